// SHA-256: OpenSSL's where the library was built with it, which is quick; else one of its own.
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
    std::string hex();  // once, at the end

private:
    struct Inside;
    std::unique_ptr<Inside> inside_;
};

std::string sha256(const void *bytes, std::size_t count);

}  // namespace txl_runtime
