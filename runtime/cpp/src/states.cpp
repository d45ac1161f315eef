#include "states.hpp"

#include <algorithm>

namespace txl_runtime {
namespace {

Shape start_shape(const State &state) {
    Shape shape(state.shape);
    if (state.rows) shape[state.row_axis] = state.rows->first;
    return shape;
}

}  // namespace

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
      sides_(static_cast<std::size_t>(B_)) {
    for (const auto *state : model.states) {
        Held held{state, {Array(state->dtype, Shape(state->shape)), Array()}, {}};
        if (state->update != Rule::ring) held.sides[1] = Array(state->dtype, Shape(state->shape));
        if (state->slots) R_ = state->slots;
        held_.push_back(std::move(held));
    }
    reset();
}

void States::reset() {
    std::fill(sides_.begin(), sides_.end(), 0);
    for (auto &held : held_) {
        held.there = {!held.state->absent, !held.state->absent};
        held.sides[0].shape = start_shape(*held.state);
        if (held.state->update == Rule::replace) held.sides[1].shape = held.sides[0].shape;
        if (held.state->batch_axis < 0) start(held, -1);
    }
    for (std::int64_t row = 0; row < B_; ++row) reset(row);
}

void States::reset(std::int64_t row) {
    fill()[row] = static_cast<std::int32_t>(std::min(model_.manifest.fresh_fill(), most_));
    head_.as<std::int32_t>()[row] = 0;
    for (auto &held : held_)
        if (held.state->batch_axis >= 0) start(held, row);
}

// Writes what a sequence starts as; of a shared tensor, all of it.
void States::start(Held &held, std::int64_t row) {
    const auto &state = *held.state;
    const auto first = model_.initial.at(state.name).view();
    if (state.counted()) {
        const auto slots = rows_of(held, row);
        copy(slots, first.broadcast(slots.shape));
        return;
    }
    auto view = held.sides[row < 0 ? 0 : static_cast<std::size_t>(side(row))].view();
    if (row >= 0) view = view.at(state.batch_axis, row);
    if (view.shape.product()) copy(view, first.broadcast(view.shape));
}

View States::rows_of(const Held &held, std::int64_t row) const {
    const auto &array = held.sides[held.state->update == Rule::ring ? 0 : static_cast<std::size_t>(side(row))];
    return array.view().at(held.state->batch_axis, row).moved(held.state->row_axis - 1, 0);
}

template <typename Move>
void States::pieces(std::int64_t row, Move move) const {
    const std::int64_t count = fill_.as<std::int32_t>()[row];
    if (!ring_) return move(M_ - count, 0, count);
    const std::int64_t first = ((head_.as<std::int32_t>()[row] - count) % R_ + R_) % R_,
                       before = std::min(count, R_ - first);
    move(first, 0, before);
    move(0, before, count - before);
}

Carried States::take(const std::vector<std::int32_t> &rows) const {
    Carried found;
    for (auto row : rows) {
        found.fill.push_back(fill_.as<std::int32_t>()[row]);
        found.head.push_back(ring_ ? head_.as<std::int32_t>()[row] : 0);
    }
    const std::int64_t n = static_cast<std::int64_t>(rows.size()),
                       longest = *std::max_element(found.fill.begin(), found.fill.end());
    for (const auto &held : held_) {
        const auto &state = *held.state;
        if (state.counted()) {
            Shape shape(state.row_shape());
            shape.insert(0, longest), shape.insert(0, n);
            Array all(TXL_FLOAT32, shape);
            for (std::int64_t i = 0; i < n; ++i) {
                const auto row = rows[static_cast<std::size_t>(i)];
                const auto slots = rows_of(held, row);
                const auto to = all.view().at(0, i).narrow(0, longest - found.fill[static_cast<std::size_t>(i)],
                                                           found.fill[static_cast<std::size_t>(i)]);
                pieces(row, [&](std::int64_t from, std::int64_t at, std::int64_t count) {
                    copy(to.narrow(0, at, count), slots.narrow(0, from, count));
                });
            }
            found.tensors.emplace(state.name, std::move(all));
            continue;
        }
        if (!held.there[static_cast<std::size_t>(side(rows[0]))]) continue;
        Shape shape = held.sides[static_cast<std::size_t>(side(rows[0]))].shape;
        if (state.batch_axis >= 0) shape[state.batch_axis] = n;
        Array all(state.dtype, shape);
        if (state.batch_axis < 0) copy(all.view(), held.sides[static_cast<std::size_t>(side(0))].view());
        for (std::int64_t i = 0; state.batch_axis >= 0 && i < n; ++i) {
            const auto row = rows[static_cast<std::size_t>(i)];
            copy(all.view().at(state.batch_axis, i),
                 held.sides[static_cast<std::size_t>(side(row))].view().at(state.batch_axis, row));
        }
        found.tensors.emplace(state.name, std::move(all));
    }
    return found;
}

void States::put(const std::vector<std::int32_t> &rows, const Carried &carried) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto row = rows[i];
        fill()[row] = static_cast<std::int32_t>(std::min<std::int64_t>(carried.fill[i], most_));
        head_.as<std::int32_t>()[row] = ring_ ? static_cast<std::int32_t>((carried.head[i] % R_ + R_) % R_) : 0;
    }
    for (auto &held : held_) {
        const auto &state = *held.state;
        const auto found = carried.tensors.find(state.name);
        const auto at = static_cast<std::size_t>(side(rows[0]));
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
            const std::int64_t row = rows[i];
            if (!state.counted()) {
                copy(held.sides[static_cast<std::size_t>(side(row))].view().at(state.batch_axis, row),
                     all.at(state.batch_axis, static_cast<std::int64_t>(i)));
                continue;
            }
            const auto slots = rows_of(held, row);
            const auto own = all.at(0, static_cast<std::int64_t>(i)).narrow(0, all.shape[1] - fill()[row], fill()[row]);
            pieces(row, [&](std::int64_t to, std::int64_t from, std::int64_t count) {
                copy(slots.narrow(0, to, count), own.narrow(0, from, count));
            });
        }
    }
}

Array States::table(std::size_t index, std::int64_t b) const {
    const auto &held = held_[index];
    const auto &state = *held.state;
    if (!state.counted()) {
        const auto view = held.sides[static_cast<std::size_t>(side(0))].view();
        Shape shape = view.shape;
        if (state.batch_axis >= 0) shape[state.batch_axis] = b;
        Array all(state.dtype, shape);
        if (state.batch_axis < 0) copy(all.view(), view);
        for (std::int64_t row = 0; state.batch_axis >= 0 && row < b; ++row)
            copy(all.view().at(state.batch_axis, row),
                 held.sides[static_cast<std::size_t>(side(row))].view().at(state.batch_axis, row));
        return all;
    }
    Shape shape(state.shape);
    shape[state.batch_axis] = b, shape[state.row_axis] = M_;
    Array all(TXL_FLOAT32, shape);
    for (std::int64_t row = 0; row < b; ++row) {
        const std::int64_t count = fill_.as<std::int32_t>()[row];
        const auto to = all.view().at(state.batch_axis, row).moved(state.row_axis - 1, 0).narrow(0, M_ - count, count);
        pieces(row, [&](std::int64_t from, std::int64_t at, std::int64_t some) {
            copy(to.narrow(0, at, some), rows_of(held, row).narrow(0, from, some));
        });
    }
    return all;
}

View States::counts(const std::string &role) const {
    return role == "valid" ? valid_.view() : role == "fill" ? fill_.view() : head_.view();
}

void States::join(std::int64_t rows) {
    for (std::int64_t row = 1; row < rows; ++row) {
        if (side(row) == side(0)) continue;
        for (auto &held : held_) {
            if (held.state->update == Rule::ring || held.state->batch_axis < 0) continue;
            const auto to = static_cast<std::size_t>(side(0));
            copy(held.sides[to].view().at(held.state->batch_axis, row),
                 held.sides[1 - to].view().at(held.state->batch_axis, row));
        }
        sides_[static_cast<std::size_t>(row)] = side(0);
    }
}

void States::advance(std::int64_t rows) {
    for (std::int64_t row = 0; row < B_; ++row) {
        const auto count = valid()[row];
        auto &head = head_.as<std::int32_t>()[row];
        if (counted_) fill()[row] = static_cast<std::int32_t>(std::min(std::int64_t{fill()[row]} + count, most_));
        if (ring_) head += count;
        if (ring_ && head >= R_) {
            head -= static_cast<std::int32_t>(R_);
            for (const auto &held : held_) {
                if (held.state->update != Rule::ring) continue;
                const auto slots = rows_of(held, row);
                copy(slots.narrow(0, 0, head), slots.narrow(0, R_, head));
            }
        }
    }
    for (std::int64_t row = 0; row < rows; ++row) sides_[static_cast<std::size_t>(row)] = 1 - side(row);
}

}  // namespace txl_runtime
