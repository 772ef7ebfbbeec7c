#include "linear.h"

namespace minisgl {

namespace {

// to[j] = from[j], added to what is there if `add`, for a panel's columns.
void put_out(const float* from, int columns, bool add, float* to) {
  if (columns == kPanel) {
    for (int j = 0; j < kPanel; j += 16) store(to + j, add ? load(to + j) + load(from + j) : load(from + j));
  } else {
    for (int j = 0; j < columns; ++j) to[j] = add ? to[j] + from[j] : from[j];
  }
}

}  // namespace

Input Forms::make(int64_t rows) {
  Input in;
  in.stride = stride_;
  const int64_t size = rows * stride_;
  if (has_f32_) in.f32 = grow(f32_, size);
  if (has_b16_) in.b16 = grow(b16_, size);
  if (has_q8_) {
    in.q8 = grow(q8_, size);
    in.scale = grow(scale_, size / kBlock);
    in.sums = grow(sums_, size / kBlock * 2);
  }
  return in;
}

Place multiply_panel(const Linear& linear, int panel, const Input& x, int64_t row, int m, float* c) {
  int i = 0, first = 0;
  for (; panel >= linear.weights[i].panels(); ++i) {
    panel -= linear.weights[i].panels();
    first += linear.weights[i].n;
  }
  const Weight& w = linear.weights[i];
  const Place at{first + panel * kPanel, std::min(kPanel, w.n - panel * kPanel)};
  multiply_tile(w, panel, x, row, m, c);
  for (int r = 0; linear.bias && r < m; ++r)
    for (int j = 0; j < at.columns; ++j) c[r * kPanel + j] += linear.bias[at.first + j];
  return at;
}

void gate_panel(const Linear& gate_up, int panel, Act act, const Input& x, int64_t row, int m,
                const Input& out) {
  alignas(64) float gate[kRows * kPanel], up[kRows * kPanel];
  multiply_panel(gate_up, panel, x, row, m, gate);
  multiply_panel(gate_up, gate_up.weights[0].panels() + panel, x, row, m, up);
  for (int i = 0; i < m; ++i) {  // a panel's outputs beyond the last are zero, and stay so
    const float *a = gate + i * kPanel, *b = up + i * kPanel;
    put_block(out, row + i, panel, apply(act, load(a)) * load(b),
              apply(act, load(a + 16)) * load(b + 16));
  }
}

void multiply(Team& team, const Linear& linear, const Input& x, int64_t rows, float* out, bool add) {
  const int64_t stride = linear.outputs();
  for_panels(team, linear.panels(), rows, [&](int panel, int64_t row, int m) {
    alignas(64) float c[kRows * kPanel];
    const Place at = multiply_panel(linear, panel, x, row, m, c);
    for (int i = 0; i < m; ++i) {
      put_out(c + i * kPanel, at.columns, add, out + (row + i) * stride + at.first);
    }
  });
}

}  // namespace minisgl
