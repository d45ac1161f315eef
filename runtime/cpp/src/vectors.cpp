// A reader of stored vectors; those of bundles before 2.1 are a zip of NumPy's arrays.
#include <algorithm>

#include "error.hpp"
#include "ranges.hpp"
#include "safetensors.hpp"

#ifdef TXL_ZLIB
#include <zlib.h>
#endif

namespace txl_runtime {
namespace {

constexpr std::uint64_t EXPANDED = 64,
                        SMALL = 1U << 26;  // unpacked vectors have at most 64 times the file's bytes, or 64 MiB

#ifdef TXL_ZLIB

// Inflate `packed`; return true if it fills `into` exactly.
bool inflated(std::string_view packed, std::string &into) {
    z_stream stream{};
    if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) return false;
    stream.next_in = reinterpret_cast<Bytef *>(const_cast<char *>(packed.data()));
    stream.avail_in = static_cast<uInt>(packed.size());
    stream.next_out = reinterpret_cast<Bytef *>(into.data());
    stream.avail_out = static_cast<uInt>(into.size());
    const auto said = inflate(&stream, Z_FINISH);
    const auto left = stream.avail_out;
    inflateEnd(&stream);
    return said == Z_STREAM_END && !left;
}

#endif

// Read an array in NumPy's format 1.0: plain numbers, exactly as many as its header says.
Stored array_of(std::string &content) {
    static const std::map<std::string, std::string> TYPES = {
        {"|b1", "BOOL"}, {"|i1", "I8"},  {"|u1", "U8"},  {"<i2", "I16"}, {"<u2", "U16"}, {"<i4", "I32"},
        {"<u4", "U32"},  {"<i8", "I64"}, {"<u8", "U64"}, {"<f2", "F16"}, {"<f4", "F32"}, {"<f8", "F64"}};
    const auto sound = [](bool holds) { need(holds, TXL_BUNDLE, "an array that is no plain array of numbers"); };
    sound(content.size() >= 10 && content.compare(0, 8, std::string("\x93NUMPY\x01\x00", 8)) == 0);
    const auto length = std::size_t(little(content, 8, 2));
    sound(content.size() >= 10 + length);
    const auto header = content.substr(10, length);
    const auto text = [&](const std::string &key, char begin, char end) {
        const auto at = header.find("'" + key + "':");
        const auto first = header.find(begin, at == std::string::npos ? at : at + key.size() + 3);
        const auto last = header.find(end, first == std::string::npos ? first : first + 1);
        sound(at != std::string::npos && last != std::string::npos);
        return header.substr(first + 1, last - first - 1);
    };
    const auto dtype = TYPES.find(text("descr", '\'', '\''));
    sound(dtype != TYPES.end());
    Stored found{dtype->second, {}, std::string_view(content).substr(10 + length)};
    const auto sizes = text("shape", '(', ')');
    for (std::size_t at = 0; (at = sizes.find_first_not_of(" ,", at)) != std::string::npos;) {
        const auto digits = sizes.substr(at, sizes.find_first_of(" ,", at) - at);
        sound(digits.size() < 13 && digits.find_first_not_of("0123456789") == std::string::npos &&
              found.shape.size() < 32);
        found.shape.push_back(std::stoll(digits));
        at += digits.size();
    }
    const auto width = width_of(found.dtype);
    double wanted = double(width);
    for (auto size : found.shape) wanted *= double(size);
    sound(wanted == double(found.bytes.size()));
    if (header.find("'fortran_order': True") == std::string::npos || found.shape.size() < 2) return found;
    std::string ordered;  // the file is in Fortran order: make it row-major
    for (std::int64_t i = 0; i < found.size(); ++i) {
        std::int64_t left = i, behind = found.size(), at = 0;
        for (auto axis = found.shape.rbegin(); axis != found.shape.rend(); ++axis) {
            behind /= *axis;
            at += left % *axis * behind, left /= *axis;
        }
        ordered += found.bytes.substr(std::size_t(at) * width, width);
    }
    content.replace(10 + length, ordered.size(), ordered);
    return found;
}

// Read the arrays of a zip. Its central directory names the members; a local header before each has its place.
Tensors unpacked(const std::string &file) {
    const auto sound = [](bool holds, const char *what) { need(holds, TXL_BUNDLE, what); };
    const std::string_view all = file;
    const auto end = all.rfind(std::string_view("PK\x05\x06", 4));
    sound(end != std::string_view::npos && end + 22 <= all.size(), "no zip of arrays");
    auto at = std::size_t(little(all, end + 16, 4));
    std::uint64_t total = 0;
    Tensors found;
    for (auto count = little(all, end + 10, 2); count; --count) {
        sound(at + 46 <= all.size() && all.substr(at, 4) == std::string_view("PK\x01\x02", 4), "a damaged directory");
        const auto way = little(all, at + 10, 2), packed = little(all, at + 20, 4), size = little(all, at + 24, 4);
        const auto length = std::size_t(little(all, at + 28, 2)), local = std::size_t(little(all, at + 42, 4));
        sound(at + 46 + length <= all.size() && local + 30 <= all.size(), "a damaged directory");
        auto name = std::string(all.substr(at + 46, length));
        const auto begin = local + 30 + std::size_t(little(all, local + 26, 2) + little(all, local + 28, 2));
        sound(begin <= all.size() && packed <= all.size() - begin, "an array that is cut off");
        sound((total += size) <= std::max<std::uint64_t>(SMALL, EXPANDED * all.size()),
              "arrays that are too large for their file");
        sound(way == 8 || (way == 0 && size == packed), "an array that is compressed in an unknown way");
        std::string content(all.substr(begin, std::size_t(packed)));
        if (way == 8) {
#ifdef TXL_ZLIB
            std::string wide(std::size_t(size), '\0');
            sound(inflated(content, wide), "an array that cannot be inflated");
            content = std::move(wide);
#else
            refuse(TXL_UNSUPPORTED,
                   "arrays that are compressed, which this library reads where it was built with zlib");
#endif
        }
        if (ends_with(name, ".npy")) name.resize(name.size() - 4);
        found.memory.push_back(std::move(content));
        found.all[name] = array_of(found.memory.back());
        at += 46 + length + std::size_t(little(all, at + 30, 2) + little(all, at + 32, 2));
    }
    for (auto &[_, array] : found.all)
        sound(array.bytes.data() != nullptr || array.size() == 0, "an array without numbers");
    return found;
}

}  // namespace

Tensors read_vectors(std::string file, const std::string &where) {
    try {
        if (ends_with(where, ".npz")) return unpacked(file);
        std::list<std::string> memory = {std::move(file)};
        auto found = read_tensors(memory.front(), memory.front().size(), TXL_BUNDLE, where);
        found.memory = std::move(memory);
        return found;
    } catch (const Refused &refused) {
        refuse(refused.code, where, ": ", refused.what(), "; expected stored vectors; export the model again");
    }
}

}  // namespace txl_runtime
