#include "safetensors.hpp"

#include <algorithm>
#include <cstring>

#include "error.hpp"
#include "json.hpp"
#include "ranges.hpp"

namespace txl_runtime {
namespace {

constexpr std::uint64_t MOST_HEADER = 100000000;  // bytes; the limit of safetensors' own reader
constexpr std::uint64_t FAR = 1ULL << 62;         // sizes and offsets lie below it, so that sums of two fit 64 bits

std::uint64_t header_length(std::string_view head, std::uint64_t size, std::uint64_t most, txl_code code,
                            const std::string &where) {
    const auto length = head.size() < 8 ? 0 : little(head, 0, 8);
    need(head.size() >= 8 && length <= std::min(size - 8, most), code, where, ": it has ", size,
         " bytes and its header ", length, ", expected a safetensors file; take a whole copy of it");
    return length;
}

// Read the header at the beginning of a file of `size` bytes.
Tensors header_of(std::string_view head, std::uint64_t size, std::uint64_t most, txl_code code,
                  const std::string &where) {
    const auto length = header_length(head, size, most, code, where), start = 8 + length;
    const auto natural = [](const Json &one) { return one.is_number_unsigned() && one.get<std::uint64_t>() < FAR; };
    Tensors found;
    try {
        const auto document = parse_json(head.substr(8, length), where);
        need(document.is_object(), code, where, ": its header is no object, expected a safetensors file");
        for (const auto &[name, row] : document.items()) {
            if (name == "__metadata__") {
                if (!row.is_null()) row.get_to(found.facts);
                continue;
            }
            Stored one{row.at("dtype"), {}};
            const auto &shape = row.at("shape"), &places = row.at("data_offsets");
            need(shape.is_array() && shape.size() <= 32 && places.is_array() && places.size() == 2 &&
                     ranges::all_of(shape, natural) && ranges::all_of(places, natural),
                 code, where, ": what it says of ", brief(name), " is no tensor; take a whole copy of it");
            shape.get_to(one.shape);
            one.first = start + places[0].get<std::uint64_t>(), one.last = start + places[1].get<std::uint64_t>();
            need(one.first <= one.last && one.last <= size, code, where, ": ", brief(name),
                 " lies behind the end of the file, expected it inside; take a whole copy of it");
            found.all[name] = one;
        }
    } catch (const Json::exception &error) {
        refuse(code, where, ": its header is damaged (", brief(error.what()), "), expected a safetensors file");
    } catch (const Refused &refused) {
        throw Refused(code, refused.what());
    }
    return found;
}

}  // namespace

std::size_t width_of(const std::string &dtype) {
    static const std::map<std::string, std::size_t> WIDTHS = {
        {"BOOL", 1}, {"I8", 1},  {"U8", 1},  {"I16", 2}, {"U16", 2}, {"F16", 2}, {"BF16", 2},
        {"I32", 4},  {"U32", 4}, {"F32", 4}, {"I64", 8}, {"U64", 8}, {"F64", 8}};
    const auto found = WIDTHS.find(dtype);
    return found == WIDTHS.end() ? 0 : found->second;
}

const char *stored_name(txl_dtype dtype) {
    static constexpr const char *NAMES[] = {"", "BOOL", "I32", "F32", "F16", "BF16"};
    return NAMES[dtype];
}

std::uint64_t little(std::string_view bytes, std::size_t at, std::size_t count) {
    std::uint64_t number = 0;
    for (std::size_t i = count; i-- > 0;) number = number << 8 | static_cast<unsigned char>(bytes[at + i]);
    return number;
}

const Stored *Tensors::find(const std::string &name) const {
    const auto found = all.find(name);
    return found == all.end() ? nullptr : &found->second;
}

std::int64_t Stored::size() const {
    std::int64_t found = 1;
    for (auto one : shape) found *= one;
    return found;
}

double Stored::number(std::int64_t index) const {
    need(index >= 0 && index < size(), TXL_BUNDLE, "stored vectors do not fit one another; export the model again");
    const auto *at = bytes.data() + index * width_of(dtype);
    const auto as = [&](auto number) { return double((std::memcpy(&number, at, sizeof number), number)); };
    if (dtype == "F64") return as(double{});
    if (dtype == "I64" || dtype == "U64") return as(std::int64_t{});
    if (dtype == "I16" || dtype == "U16") return as(std::int16_t{});
    if (dtype == "I8" || dtype == "U8") return as(std::int8_t{});
    for (auto own : {TXL_BOOL, TXL_INT32, TXL_FLOAT32, TXL_FLOAT16, TXL_BFLOAT16})
        if (dtype == stored_name(own)) return number_at(at, own);
    return as(std::int32_t{});
}

Tensors read_header(const Files &files, const std::string &name) {
    const auto size = files.size(name), begin = std::min<std::uint64_t>(size, 8);
    const auto length = header_length(files.part(name, 0, begin), size, MOST_HEADER, TXL_BUNDLE, files.where(name));
    return header_of(files.part(name, 0, 8 + length), size, MOST_HEADER, TXL_BUNDLE, files.where(name));
}

Tensors read_tensors(std::string_view bytes, std::uint64_t most, txl_code code, const std::string &where) {
    auto found = header_of(bytes, bytes.size(), most, code, where);
    std::vector<std::tuple<std::uint64_t, std::uint64_t, std::string>> order;
    for (const auto &[name, one] : found.all) order.emplace_back(one.first, one.last, name);
    ranges::sort(order);
    std::uint64_t end = 8 + header_length(bytes, bytes.size(), most, code, where);
    for (const auto &[first, last, name] : order) {
        auto &one = found.all[name];
        std::uint64_t wanted = width_of(one.dtype);
        for (std::uint64_t size : one.shape) {
            need(!size || wanted <= FAR / size, code, where, ": ", brief(name), " is too large");
            wanted *= size;
        }
        need(width_of(one.dtype) && first == end && last - first == wanted, code, where, ": ", brief(name), " is ",
             brief(one.dtype), " ", listed(one.shape), " in ", last - first, " bytes from ", first, " on, expected ",
             wanted, " from ", end, " on; take a whole copy of it");
        one.bytes = bytes.substr(first, wanted);
        need(one.dtype != "BOOL" || one.bytes.find_first_not_of(std::string_view("\0\1", 2)) == std::string_view::npos,
             code, where, ": ", brief(name), " is BOOL and holds other numbers than 0 and 1; take a whole copy of it");
        end = last;
    }
    need(end == bytes.size(), code, where, ": its tensors end at ", end, ", its data at ", bytes.size(),
         "; take a whole copy of it");
    return found;
}

std::string write_tensors(const std::map<std::string, View> &tensors, const std::map<std::string, std::string> &facts) {
    Json header;
    header["__metadata__"] = facts;
    std::uint64_t end = 0;
    for (const auto &[name, view] : tensors) {
        const auto bytes = view.bytes();
        header[name] = {{"dtype", stored_name(view.dtype)},
                        {"shape", Sizes(view.shape.begin(), view.shape.end())},
                        {"data_offsets", {end, end + bytes}}};
        end += bytes;
    }
    auto text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    std::string file;
    for (std::size_t i = 0; i < 8; ++i) file += char(text.size() >> (8 * i));
    file += text;
    for (const auto &[name, view] : tensors) {
        const auto at = file.size();
        file.resize(at + view.bytes());
        copy(View(file.data() + at, view.dtype, view.shape), view);
    }
    return file;
}

}  // namespace txl_runtime
