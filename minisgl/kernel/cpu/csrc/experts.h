// A mixture of experts in the place of a layer's MLP.
//
//   l = n Wrouter                       n: the normed rows; sums in float32
//   each token's experts: the top of l; of equal ones the lowest ids
//   pairs of a token and its expert, sorted by expert, an expert's by token:
//
//       token 0: 2 0   token 1: 2 3   token 2: 0 2
//       expert    0       2         3
//       tokens  | 0  2 |  0  1  2 | 1 |
//
//   g = n's rows in this order
//   h = act(g Wgate) * (g Wup)          with each expert's own weights, for all its rows at once
//   x[token] += weight * (h Wdown)      one thread adds all of a token's experts, by rising id
//
// So each expert's weights are read once a step, by all threads together, and what a token gets
// depends on nothing else in the batch. The expert that every token passes in Qwen2-MoE comes last:
// its number is `count`, its weight the sigmoid of one more output of the router.
#pragma once

#include "linear.h"

namespace minisgl {

// Filled by the Python side through ctypes; pointers are never owned.
struct Experts {
  int count, chosen;      // of which each token takes so many
  int renormalize;        // whether their weights sum to 1
  int shared;             // 1 if there is one more, for every token
  Linear router;          // count + shared outputs
  const Linear *gate_up, *down;  // [count + shared]
};

// Computes the mixtures of all layers, one after another, in the same memory.
class Mixture {
 public:
  Mixture(int hidden, Act act) : hidden_(hidden), act_(act) {}

  // Of each layer, before anything else; `forms` are those of x.
  void require(const Experts& experts, Forms& forms);

  // Memory for so many tokens.
  void make(int64_t rows);

  // out [rows][hidden] += what the experts give for x; called by all threads, which must wait
  // after it.
  void run(Team& team, const Experts& experts, const Input& x, float* out);

 private:
  // An expert that some token chose: its pairs, and where its panels' work begins and ends in all.
  struct Group {
    int expert;
    int64_t first, rows, begin, end;
  };

  void choose(Team& team, const Experts& experts);
  void sort(const Experts& experts);
  void gate(Team& team, const Experts& experts);
  void add_down(Team& team, const Experts& experts, float* out);

  const int hidden_;
  const Act act_;
  int each_ = 0;  // the most experts of a token
  int64_t outputs_ = 0, rows_ = 0;
  Forms gathered_forms_, inner_forms_;
  Input gathered_, inner_;      // a row a pair
  Buffer<float> logits_;        // [rows][outputs of the router]
  Buffer<int32_t> ids_;         // [rows][chosen + shared], and their weights
  Buffer<float> weights_;
  Buffer<int32_t> tokens_;      // of each pair, and its weight
  Buffer<float> pair_weights_;
  std::vector<int64_t> places_;  // of each expert's next pair
  std::vector<Group> groups_;
};

}  // namespace minisgl
