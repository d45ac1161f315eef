#include "sha256.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <new>

#ifdef TXL_OPENSSL
#include <openssl/evp.h>
#endif

namespace txl_runtime {
namespace {

std::string hexadecimal(const unsigned char *bytes, std::size_t count) {
    static constexpr char DIGITS[] = "0123456789abcdef";
    std::string text;
    for (std::size_t i = 0; i < count; ++i) text += {DIGITS[bytes[i] >> 4], DIGITS[bytes[i] & 15]};
    return text;
}

}  // namespace

#ifdef TXL_OPENSSL

struct Sha256::Inside {
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    ~Inside() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : inside_(std::make_unique<Inside>()) {
    if (!inside_->context || !EVP_DigestInit_ex(inside_->context, EVP_sha256(), nullptr)) throw std::bad_alloc();
}

void Sha256::add(const void *bytes, std::size_t count) { EVP_DigestUpdate(inside_->context, bytes, count); }

std::string Sha256::hex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int count = 0;
    EVP_DigestFinal_ex(inside_->context, digest, &count);
    return hexadecimal(digest, count);
}

#else

namespace {

constexpr std::array<std::uint32_t, 64> K = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t turned(std::uint32_t word, int by) { return (word >> by) | (word << (32 - by)); }

}  // namespace

struct Sha256::Inside {
    std::array<std::uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<unsigned char, 64> block{};
    std::size_t held = 0;
    std::uint64_t total = 0;

    void round() {
        std::array<std::uint32_t, 64> w{};
        for (std::size_t i = 0; i < 16; ++i)
            w[i] = std::uint32_t(block[4 * i]) << 24 | std::uint32_t(block[4 * i + 1]) << 16 |
                   std::uint32_t(block[4 * i + 2]) << 8 | block[4 * i + 3];
        for (std::size_t i = 16; i < 64; ++i) {
            const auto a = turned(w[i - 15], 7) ^ turned(w[i - 15], 18) ^ (w[i - 15] >> 3);
            const auto b = turned(w[i - 2], 17) ^ turned(w[i - 2], 19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16] + a + w[i - 7] + b;
        }
        auto s = state;
        for (std::size_t i = 0; i < 64; ++i) {
            const auto e = turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25),
                       choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
            const auto first = s[7] + e + choice + K[i] + w[i];
            const auto a = turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22);
            const auto most = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
            s = {first + a + most, s[0], s[1], s[2], s[3] + first, s[4], s[5], s[6]};
        }
        for (std::size_t i = 0; i < 8; ++i) state[i] += s[i];
    }
};

Sha256::Sha256() : inside_(std::make_unique<Inside>()) {}

void Sha256::add(const void *bytes, std::size_t count) {
    const auto *from = static_cast<const unsigned char *>(bytes);
    inside_->total += count;
    while (count) {
        const auto taken = std::min(count, 64 - inside_->held);
        std::memcpy(inside_->block.data() + inside_->held, from, taken);
        inside_->held += taken, from += taken, count -= taken;
        if (inside_->held == 64) inside_->round(), inside_->held = 0;
    }
}

std::string Sha256::hex() {
    const auto bits = inside_->total * 8;
    const unsigned char one = 0x80, none = 0;
    add(&one, 1);
    while (inside_->held != 56) add(&none, 1);
    unsigned char length[8], digest[32];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
    add(length, 8);
    for (int i = 0; i < 32; ++i) digest[i] = static_cast<unsigned char>(inside_->state[i / 4] >> (24 - 8 * (i % 4)));
    return hexadecimal(digest, 32);
}

#endif

Sha256::~Sha256() = default;

std::string sha256(const void *bytes, std::size_t count) {
    Sha256 digest;
    digest.add(bytes, count);
    return digest.hex();
}

}  // namespace txl_runtime
