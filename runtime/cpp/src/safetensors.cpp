#include "safetensors.hpp"

#include <algorithm>
#include <cstring>

#include "error.hpp"

namespace txl_runtime {
namespace {

constexpr std::uint64_t MOST_HEADER = 100000000;  // as safetensors itself allows

std::uint64_t width_of(const std::string &dtype) {
    static const std::map<std::string, std::uint64_t> WIDTHS = {
        {"BOOL", 1}, {"I8", 1},  {"U8", 1},  {"I16", 2}, {"U16", 2}, {"F16", 2}, {"BF16", 2},
        {"I32", 4},  {"U32", 4}, {"F32", 4}, {"I64", 8}, {"U64", 8}, {"F64", 8}};
    const auto found = WIDTHS.find(dtype);
    return found == WIDTHS.end() ? 0 : found->second;
}

bool natural(const Json &number) { return number.is_number_unsigned() && number.get<std::uint64_t>() < (1ULL << 62); }

}  // namespace

std::uint64_t header_length(std::string_view head, std::uint64_t size, std::uint64_t most, txl_code code,
                            const std::string &where) {
    std::uint64_t length = 0;
    if (head.size() >= 8)
        for (std::size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(head[i]);
    need(head.size() >= 8 && length <= std::min(size - 8, most), code, where, ": it has ", size,
         " bytes and its header ", length, ", expected a safetensors file; take a whole copy of it");
    return length;
}

Header read_header(std::string_view head, std::uint64_t size, std::uint64_t most, txl_code code,
                   const std::string &where) {
    const auto length = header_length(head, size, most, code, where);
    Header found{{}, {}, 8 + length};
    try {
        const auto document = parse_json(head.substr(8, static_cast<std::size_t>(length)), where);
        need(document.is_object(), code, where, ": its header is no object, expected a safetensors file");
        for (const auto &[name, row] : document.items()) {
            if (name == "__metadata__") {
                if (!row.is_null()) found.facts = row.get<std::map<std::string, std::string>>();
                continue;
            }
            Entry entry{row.at("dtype").get<std::string>(), {}, 0, 0};
            const auto &shape = row.at("shape"), &places = row.at("data_offsets");
            bool sound = shape.is_array() && shape.size() <= 32 && places.is_array() && places.size() == 2 &&
                         natural(places[0]) && natural(places[1]);
            for (std::size_t i = 0; sound && i < shape.size(); ++i) {
                sound = natural(shape[i]);
                if (sound) entry.shape.push_back(shape[i].get<std::int64_t>());
            }
            need(sound, code, where, ": what it says of ", brief(name), " is no tensor; take a whole copy of it");
            entry.first = places[0].get<std::uint64_t>(), entry.last = places[1].get<std::uint64_t>();
            need(entry.first <= entry.last && entry.last <= size - found.start, code, where, ": ", brief(name),
                 " lies behind the end of the file, expected it inside; take a whole copy of it");
            found.entries[name] = entry;
        }
    } catch (const Json::exception &error) {
        refuse(code, where, ": its header is damaged (", brief(error.what()), "), expected a safetensors file");
    } catch (const Refused &refused) {
        throw Refused(code, refused.what());
    }
    return found;
}

Header read_header(const Files &files, const std::string &name) {
    const auto size = files.size(name), begin = std::min<std::uint64_t>(size, 8);
    const auto length = header_length(files.part(name, 0, begin), size, MOST_HEADER, TXL_BUNDLE, files.where(name));
    return read_header(files.part(name, 0, 8 + length), size, MOST_HEADER, TXL_BUNDLE, files.where(name));
}

Tensors read_tensors(std::string_view bytes, std::uint64_t most, txl_code code, const std::string &where) {
    Tensors found{read_header(bytes, bytes.size(), most, code, where), bytes};
    std::vector<std::pair<std::uint64_t, std::string>> order;
    for (const auto &[name, entry] : found.header.entries) order.emplace_back(entry.first, name);
    std::sort(order.begin(), order.end(), [&](const auto &a, const auto &b) {
        return std::pair(a.first, found.entry(a.second).last) < std::pair(b.first, found.entry(b.second).last);
    });
    std::uint64_t end = 0;
    for (const auto &[first, name] : order) {
        const auto &entry = found.entry(name);
        const auto width = width_of(entry.dtype);
        std::uint64_t wanted = width;
        for (auto size : entry.shape) {
            const auto wide = static_cast<std::uint64_t>(size);
            need(!wide || wanted <= (1ULL << 62) / wide, code, where, ": ", brief(name), " is too large");
            wanted *= wide;
        }
        need(width && first == end && entry.last - first == wanted, code, where, ": ", brief(name), " is ",
             brief(entry.dtype), " ", listed(entry.shape), " in ", entry.last - first, " bytes from ", first,
             " on, expected ", wanted, " from ", end, " on; take a whole copy of it");
        const auto *values = found.data(name);
        need(entry.dtype != "BOOL" ||
                 std::all_of(values, values + wanted, [](char one) { return one == 0 || one == 1; }),
             code, where, ": ", brief(name), " is BOOL and holds other numbers than 0 and 1; take a whole copy of it");
        end = entry.last;
    }
    need(end == bytes.size() - found.header.start, code, where, ": its tensors end at ", end, ", its data at ",
         bytes.size() - found.header.start, "; take a whole copy of it");
    return found;
}

std::string write_tensors(const std::map<std::string, View> &tensors, const std::map<std::string, std::string> &facts) {
    Json header = Json::object();
    header["__metadata__"] = facts;
    std::uint64_t end = 0;
    for (const auto &[name, view] : tensors) {
        const auto bytes = static_cast<std::uint64_t>(view.shape.product()) * size_of(view.dtype);
        header[name] = {{"dtype", stored_name(view.dtype)},
                        {"shape", std::vector<std::int64_t>(view.shape.begin(), view.shape.end())},
                        {"data_offsets", {end, end + bytes}}};
        end += bytes;
    }
    auto text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');
    std::string file(8, '\0');
    for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(text.size() >> (8 * i));
    file += text;
    for (const auto &[name, view] : tensors) {
        const auto at = file.size();
        file.resize(at + static_cast<std::size_t>(view.shape.product()) * size_of(view.dtype));
        copy(View(file.data() + at, view.dtype, view.shape), view);
    }
    return file;
}

const char *stored_name(txl_dtype dtype) {
    static constexpr const char *NAMES[] = {"", "BOOL", "I32", "F32", "F16", "BF16"};
    return NAMES[dtype];
}

}  // namespace txl_runtime
