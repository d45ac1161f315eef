// SHA-256: OpenSSL's, which is faster, if the library was built with it; else our own.
#pragma once
#include <cstddef>
#include <memory>
#include <string>

namespace txl_runtime {

class Sha256 {
public:
    Sha256();
    ~Sha256();
    Sha256(const Sha256 &) = delete;
    Sha256 &operator=(const Sha256 &) = delete;
    void add(const void *bytes, std::size_t count);
    std::string hex();  // ends the hash: call it once

private:
    struct Inside;
    std::unique_ptr<Inside> inside_;
};

std::string sha256(const void *bytes, std::size_t count);

}  // namespace txl_runtime
