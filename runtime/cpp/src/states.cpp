#include "states.hpp"
#include "ranges.hpp"

#include <algorithm>
#include <numeric>

namespace txl_runtime {
States::States(const Model &model, std::int64_t most)
    : model_(model),
      B_(model.manifest.B),
      M_(model.manifest.memory_length()),
      R_(1),
      most_(most),
      counted_(model.manifest.counts_rows()),
      ring_(model.update == Rule::ring),
      valid_(TXL_INT32, {B_}),
      fill_(TXL_INT32, {B_}),
      head_(TXL_INT32, {B_}),
      sides_(std::size_t(B_)) {
    for (const auto *state : model.states) {
        Held held{state, Layout::table, {}, {}};
        if (model.native) held.layout = held_.size() % 2 ? Layout::values : Layout::keys;
        held.sides[0] =
            model.native ? model.native->memory(*state, held.layout) : Array(state->dtype, Shape(state->shape));
        if (state->update != Rule::ring) held.sides[1] = Array(state->dtype, Shape(state->shape));
        if (state->slots) R_ = state->slots;
        held_.push_back(std::move(held));
    }
    reset();
}

void States::reset() {
    ranges::fill(sides_, 0);
    for (auto &held : held_) {
        held.there = {!held.state->absent, !held.state->absent};
        if (held.state->rows)
            for (auto &side : held.sides) side.shape[held.state->row_axis] = held.state->rows->first;
        if (held.state->batch_axis < 0) start(held, -1);
    }
    for (std::int64_t row = 0; row < B_; ++row) reset(row);
}

void States::reset(std::int64_t row) {
    fill()[row] = std::int32_t(std::min(model_.manifest.fresh_fill(), most_));
    head_.as<std::int32_t>()[row] = 0;
    for (auto &held : held_)
        if (held.state->batch_axis >= 0) start(held, row);
}

// Write a sequence's initial value; row -1 writes a whole tensor that sequences share.
void States::start(Held &held, std::int64_t row) {
    const auto first = model_.initial.at(held.state->name).view();
    if (model_.native)
        return run(0, 0, R_, [&](std::int64_t slot, std::int64_t, std::int64_t count) {
            const auto to = slots_of(held, row, slot, count);
            copy(to, first.broadcast(to.shape));
        });
    const auto view = held.state->counted() ? rows_of(held, row) : row < 0 ? held.sides[0].view() : own(held, row);
    if (view.shape.product()) copy(view, first.broadcast(view.shape));
}

View States::own(const Held &held, std::int64_t row) const {
    return held.sides[held.state->update == Rule::ring ? 0 : side(row)].view().at(held.state->batch_axis, row);
}

View States::rows_of(const Held &held, std::int64_t row) const {
    return own(held, row).moved(held.state->row_axis - 1, 0);
}

View States::slots_of(const Held &held, std::int64_t row, std::int64_t first, std::int64_t count) const {
    if (held.layout == Layout::table) return rows_of(held, row).narrow(0, first, count);
    return native_slots(own(held, row), held.layout, held.state->shape.back(), first, count);
}

template <typename Move>
void States::run(std::int64_t first, std::int64_t before, std::int64_t count, Move move) const {
    if (!model_.native) return move(first, before, count);
    for (std::int64_t some = 0; count > 0; first += some, before += some, count -= some)
        move(first, before, some = std::min(count, STRIP_SLOTS - first % STRIP_SLOTS));
}

template <typename Move>
void States::pieces(std::int64_t row, Move move) const {
    const std::int64_t count = fill()[row];
    if (!ring_) return move(M_ - count, 0, count);
    const std::int64_t first = ((head_.as<std::int32_t>()[row] - count) % R_ + R_) % R_,
                       before = std::min(count, R_ - first);
    run(first, 0, before, move);
    run(0, before, count - before, move);
}

Array States::gathered(const Held &held, const std::vector<std::int32_t> &rows) const {
    const auto &now = held.sides[side(rows[0])];
    const auto axis = held.state->batch_axis;
    Shape shape = now.shape;
    if (axis >= 0) shape[axis] = rows.size();
    Array all(now.dtype, shape);
    if (axis < 0) copy(all.view(), now.view());
    for (std::size_t i = 0; axis >= 0 && i < rows.size(); ++i) copy(all.view().at(axis, i), own(held, rows[i]));
    return all;
}

Carried States::take(const std::vector<std::int32_t> &rows) const {
    Carried found;
    for (auto row : rows) {
        found.fill.push_back(fill()[row]);
        found.head.push_back(ring_ ? head_.as<std::int32_t>()[row] : 0);
    }
    const auto longest = ranges::max(found.fill);
    for (const auto &held : held_) {
        const auto &state = *held.state;
        if (!state.counted()) {
            if (held.there[side(rows[0])]) found.tensors.emplace(state.name, gathered(held, rows));
            continue;
        }
        Shape shape(state.row_shape());
        shape.insert(0, longest), shape.insert(0, rows.size());
        Array all(TXL_FLOAT32, shape);
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const auto to = all.view().at(0, i).narrow(0, longest - found.fill[i], found.fill[i]);
            pieces(rows[i], [&](std::int64_t from, std::int64_t at, std::int64_t count) {
                copy(to.narrow(0, at, count), slots_of(held, rows[i], from, count));
            });
        }
        found.tensors.emplace(state.name, std::move(all));
    }
    return found;
}

void States::put(const std::vector<std::int32_t> &rows, const Carried &carried) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto row = rows[i];
        fill()[row] = std::int32_t(std::min<std::int64_t>(carried.fill[i], most_));
        head_.as<std::int32_t>()[row] = ring_ ? (carried.head[i] % R_ + R_) % R_ : 0;
    }
    for (auto &held : held_) {
        const auto &state = *held.state;
        const auto found = carried.tensors.find(state.name);
        const auto at = std::size_t(side(rows[0]));
        held.there[at] = held.there[at] && !state.absent;
        if (found == carried.tensors.end()) continue;
        held.there[at] = true;
        const auto all = found->second.view();
        if (!state.counted()) {
            Shape shape = all.shape;
            if (state.batch_axis >= 0) shape[state.batch_axis] = B_;
            if (held.sides[at].shape != shape) held.sides[at].shape = shape, zero(held.sides[at].view());
            if (state.batch_axis < 0) copy(held.sides[at].view(), all);
        }
        for (std::size_t i = 0; state.batch_axis >= 0 && i < rows.size(); ++i) {
            if (!state.counted()) {
                copy(own(held, rows[i]), all.at(state.batch_axis, i));
                continue;
            }
            const auto count = fill()[rows[i]];
            const auto from = all.at(0, i).narrow(0, all.shape[1] - count, count);
            pieces(rows[i], [&](std::int64_t to, std::int64_t before, std::int64_t some) {
                copy(slots_of(held, rows[i], to, some), from.narrow(0, before, some));
            });
        }
    }
}

Array States::table(std::size_t index, std::int64_t b) const {
    const auto &held = held_[index];
    const auto &state = *held.state;
    if (!state.counted()) {
        std::vector<std::int32_t> rows(b);
        std::iota(rows.begin(), rows.end(), 0);
        return gathered(held, rows);
    }
    Shape shape(state.shape);
    shape[state.batch_axis] = b, shape[state.row_axis] = M_;
    Array all(TXL_FLOAT32, shape);
    for (std::int64_t row = 0; row < b; ++row) {
        const std::int64_t count = fill()[row];
        const auto to = all.view().at(state.batch_axis, row).moved(state.row_axis - 1, 0).narrow(0, M_ - count, count);
        pieces(row, [&](std::int64_t from, std::int64_t at, std::int64_t some) {
            copy(to.narrow(0, at, some), slots_of(held, row, from, some));
        });
    }
    return all;
}

Held *States::named(const std::string &name, bool returned) {
    const auto found =
        ranges::find_if(held_, [&](auto &one) { return name == (returned ? one.state->output : one.state->input); });
    return found == held_.end() ? nullptr : &*found;
}

View States::counts(const std::string &role) const {
    return role == "valid" ? valid_.view() : role == "fill" ? fill_.view() : head_.view();
}

void States::join(std::int64_t rows) {
    for (std::int64_t row = 1; row < rows; ++row) {
        if (side(row) == side(0)) continue;
        for (auto &held : held_) {
            if (held.state->update == Rule::ring || held.state->batch_axis < 0) continue;
            const auto to = std::size_t(side(0));
            copy(held.sides[to].view().at(held.state->batch_axis, row),
                 held.sides[1 - to].view().at(held.state->batch_axis, row));
        }
        sides_[row] = side(0);
    }
}

void States::advance(std::int64_t rows) {
    for (std::int64_t row = 0; row < B_; ++row) {
        const auto count = valid()[row];
        auto &head = head_.as<std::int32_t>()[row];
        if (counted_) fill()[row] = std::min(std::int64_t{fill()[row]} + count, most_);
        if (ring_) head += count;
        if (ring_ && head >= R_) {
            head -= std::int32_t(R_);
            for (const auto &held : held_) {
                if (held.layout != Layout::table || held.state->update != Rule::ring) continue;
                const auto slots = rows_of(held, row);
                copy(slots.narrow(0, 0, head), slots.narrow(0, R_, head));
            }
        }
    }
    for (std::int64_t row = 0; row < rows; ++row) sides_[row] = 1 - side(row);
}

}  // namespace txl_runtime
