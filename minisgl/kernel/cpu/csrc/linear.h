// Linear layers: weights that share an input, the input in the forms that they multiply, and the
// products shared out over the threads by panels.
#pragma once

#include "ops.h"
#include "pool.h"

namespace minisgl {

// Filled by the Python side through ctypes; pointers are never owned.
struct Linear {
  int count;  // weights one after another in the outputs (q, k, v); all share the input
  Weight weights[3];
  const float* bias;  // of all outputs, or null

  int outputs() const {
    int n = 0;
    for (int i = 0; i < count; ++i) n += weights[i].n;
    return n;
  }
  int panels() const {
    int n = 0;
    for (int i = 0; i < count; ++i) n += weights[i].panels();
    return n;
  }
};

// Memory for the most elements so far; what it held may be lost.
template <class T>
T* grow(Buffer<T>& v, int64_t size) {
  if (int64_t(v.size()) < size) v.resize(size + size / 4);
  return v.data();
}

// Memory of an input, for the most rows so far, in every form that one of its weights multiplies.
class Forms {
 public:
  void require(const Linear& linear) {
    stride_ = std::max(stride_, round_up(linear.weights[0].k, kBlock));
    for (int i = 0; i < linear.count; ++i) {
      const Type type = linear.weights[i].type;
      (type == Type::F32 ? has_f32_ : type == Type::BF16 ? has_b16_ : has_q8_) = true;
    }
  }

  Input make(int64_t rows);

 private:
  int64_t stride_ = 0;
  bool has_f32_ = false, has_b16_ = false, has_q8_ = false;
  Buffer<float> f32_, scale_;
  Buffer<bf16> b16_;
  Buffer<int8_t> q8_;
  Buffer<int32_t> sums_;
};

// Rows cut into tiles of about equal height, and these into parts for one thread each.
struct Tiles {
  explicit Tiles(int64_t rows)
      : rows(rows), count((rows + kRows - 1) / kRows), parts(std::max<int64_t>(1, count / 4)) {}

  // f(row, m) for the m rows from `row` on of each tile in [from, to).
  template <class F>
  void each(int64_t from, int64_t to, F&& f) const {
    for (int64_t i = from; i < to; ++i) {
      const int64_t row = tile_start(rows, count, i);
      f(row, int(tile_start(rows, count, i + 1) - row));
    }
  }

  template <class F>
  void each_of(int64_t part, F&& f) const {
    each(count * part / parts, count * (part + 1) / parts, f);
  }

  int64_t rows, count, parts;
};

// Call f(panel, row, m) for all tiles of m rows of all panels. A thread's items are neighbours, so
// that it reads a panel from memory once for all its rows.
template <class F>
void for_panels(Team& team, int panels, int64_t rows, F&& f) {
  const Tiles tiles(rows);
  team.share(panels * tiles.parts, [&](int64_t item) {
    const int panel = int(item / tiles.parts);
    tiles.each_of(item % tiles.parts, [&](int64_t row, int m) { f(panel, row, m); });
  });
}

// Where a panel's columns lie in the outputs.
struct Place {
  int first, columns;
};

// c [m][32] = rows [row, row + m) of x times a panel of the linear's weights, counted through all
// of them, plus its bias.
Place multiply_panel(const Linear& linear, int panel, const Input& x, int64_t row, int m, float* c);

// The same rows of out: act(gate) * up for a panel of both, gate_up's first and second weight.
void gate_panel(const Linear& gate_up, int panel, Act act, const Input& x, int64_t row, int m,
                const Input& out);

// out[row][output] = (add ? itself : 0) + x times the weights + bias, for `rows` rows; called by
// all threads, which must wait after it.
void multiply(Team& team, const Linear& linear, const Input& x, int64_t rows, float* out, bool add);

}  // namespace minisgl
