// The forward of a whole decoder as one function that every thread runs.
//
//   x = embedding                                       a row a token, float32
//   for each layer:
//     n = norm(x)                                       in the forms that the weights multiply
//     qkv = n Wqkv + b          | wait after each line: the next one reads what others wrote
//     norm, RoPE, store k and v
//     a = attention             -> o projection's input
//     x += a Wo + b
//     n = norm(x)
//     h = act(n Wgate) * (n Wup)                      or a mixture of experts: see experts.h
//     x += h Wdown + b
//   logits = norm(x[rows]) Whead                        `project`, for the rows that are asked for
//
// The residual stream and all sums are float32; only what is multiplied is rounded, to the
// weights' type (bf16) or to 8 bits with a scale for each 32 values of a row (quantized weights).
#pragma once

#include <memory>

#include "attention.h"
#include "experts.h"
#include "pack.h"

namespace minisgl {

// Plain structs, filled by the Python side through ctypes; pointers are never owned.
struct Layer {
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm and k_norm may be null
  Linear qkv, o, gate_up, down;
  const Experts* experts;  // instead of gate_up and down, or null
  int64_t window;  // 0: none
  uint8_t *keys, *values;
  float *key_scales, *value_scales;
};

struct Sizes {
  int layers, hidden, q_heads, kv_heads, dim, rotary, act, kv_type, page_size, compute;
  float eps, attention_scale;
  const float *rope, *final_norm;  // rope: [positions, rotary]
  Weight embedding;
  Linear head;
  const Layer* layer;
};

// One step's requests: tokens [cached, length) of each are computed, one request after another.
struct Step {
  int64_t count;
  const int64_t *rows, *cached, *lengths;
  const int32_t* tokens;  // [rows][token_stride]
  int64_t token_stride;
  const int32_t* pages;  // [rows][page_stride]
  int64_t page_stride;
};

class Model {
 public:
  explicit Model(const Sizes& sizes);

  void forward(Pool& pool, const Step& step);

  // Rows of the last forward to logits [count][stride]; `logits` or `best` [count] may be null.
  void project(Pool& pool, const int64_t* rows, int64_t count, float* logits, int64_t stride,
               int64_t* best);

 private:
  struct Token {
    int64_t request, position;
  };
  // Tokens [token, token + tokens) of the batch, of one request or one of each of several.
  struct AttentionItem {
    int64_t request, token;
    int requests, tokens, head, heads;
    int64_t shared;
  };
  struct Best {
    float value;
    int64_t id;
  };

  void plan(const Step& step, int threads);
  void plan_prefill(int64_t request, int64_t first);
  void plan_decodes(int64_t request, int64_t first, int64_t count, int threads);
  int64_t same_keys(int64_t a, int64_t b) const;
  template <class E>
  void run(Team& team, Attention<E>& attention);
  void embed(Team& team);
  void normalize(Team& team, const float* weight);
  void rotate_and_store(Team& team, const Layer& layer);
  template <class E>
  void attend(Team& team, const Layer& layer, Attention<E>& attention);
  void mlp(Team& team, const Layer& layer);
  KVLayer kv_layer(const Layer& layer) const;
  int64_t num_tokens() const { return int64_t(tokens_.size()); }

  const Sizes s_;
  const std::vector<Layer> layers_;
  Step step_;
  std::vector<Token> tokens_;
  std::vector<AttentionItem> items_;
  Buffer<float> x_, qkv_, attended_;
  Forms normed_forms_, context_forms_, inner_forms_, last_forms_;
  Input normed_, context_, inner_;
  Mixture mixture_;
  std::vector<std::vector<Best>> best_;  // of each thread
  std::vector<std::unique_ptr<Attention<bf16>>> attention_bf16_;  // one for each thread
  std::vector<std::unique_ptr<Attention<float>>> attention_f32_;
};

}  // namespace minisgl
