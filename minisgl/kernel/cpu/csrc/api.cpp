// What Python calls through ctypes: plain C functions over pointers that it checked.
#include "model.h"

using namespace minisgl;

#define MINISGL_API extern "C" __attribute__((visibility("default")))

MINISGL_API Pool* minisgl_pool(int threads) { return new Pool(threads); }
MINISGL_API void minisgl_pool_free(Pool* pool) { delete pool; }

MINISGL_API int64_t minisgl_panel_bytes(int type, int64_t k) { return panel_bytes(Type(type), k); }

// n rows, `stride` bytes apart, of plain values or GGUF blocks to panels.
MINISGL_API void minisgl_pack(Pool* pool, int type, const uint8_t* rows, int64_t stride, int64_t n,
                              int64_t k, uint8_t* out) {
  const int64_t bytes = panel_bytes(Type(type), k);
  pool->run([&](Team& team) {
    team.share((n + kPanel - 1) / kPanel, [&](int64_t i) {
      pack_panel(Type(type), rows, stride, int(n), k, int(i), out + i * bytes);
    });
  });
}

// out [rows][outputs] = x [rows][k] times a linear's weights, plus its bias; all float32.
MINISGL_API void minisgl_linear(Pool* pool, const Linear* linear, const float* x, int64_t rows,
                                float* out) {
  Forms forms;
  forms.require(*linear);
  const Input input = forms.make(rows);
  const int k = linear->weights[0].k;
  pool->run([&](Team& team) {
    team.split(rows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) put_row(input, i, x + i * k, k);
    });
    team.wait();
    multiply(team, *linear, input, rows, out, false);
  });
}

// out [rows][hidden] += what the experts give for x [rows][hidden]; all float32.
MINISGL_API void minisgl_experts(Pool* pool, const Experts* experts, const float* x, int64_t rows,
                                 float* out) {
  const int hidden = experts->router.weights[0].k;
  Forms forms;
  Mixture mixture(hidden, Act::Silu);
  mixture.require(*experts, forms);
  mixture.make(rows);
  const Input input = forms.make(rows);
  pool->run([&](Team& team) {
    team.split(rows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) put_row(input, i, x + i * hidden, hidden);
    });
    team.wait();
    mixture.run(team, *experts, input, out);
  });
}

// Rows `ids` of packed weights as float32 [count][k].
MINISGL_API void minisgl_lookup(const Weight* weight, const int64_t* ids, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) unpack_row(*weight, ids[i], out + i * weight->k);
}

MINISGL_API Model* minisgl_model(const Sizes* sizes) { return new Model(*sizes); }
MINISGL_API void minisgl_model_free(Model* model) { delete model; }

MINISGL_API void minisgl_forward(Model* model, Pool* pool, const Step* step) {
  model->forward(*pool, *step);
}

MINISGL_API void minisgl_project(Model* model, Pool* pool, const int64_t* rows, int64_t count,
                                 float* logits, int64_t stride, int64_t* best) {
  model->project(*pool, rows, count, logits, stride, best);
}
