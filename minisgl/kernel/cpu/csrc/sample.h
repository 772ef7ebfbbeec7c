// One token for each row of logits, drawn from softmax(logits / temperature) after filters.
//
// The filters (the k most likely; of those the fewest that reach top_p of their sum; what is at
// least min_p of the largest) all keep a beginning of the tokens sorted by probability, then id.
// So what they keep together is such a beginning too, and its end says it all:
//
//   Cut {value, equal}: p > value, and those `equal` with p = value that have the lowest ids
//
// Nothing is sorted to find it. The end lies between a smallest and a largest value; a pass counts
// and sums the values above a pivot, and leaves the part that holds the end, about half each time:
//
//   p, by id    .02 .3 .02 .1 .5 .06         top_p 0.85: the end is where 0.85 is reached
//   pivot .1    .3 + .5 = 0.8 lies above     not reached: it lies in   .02 .02 .1 .06
//   pivot .04   .1 + .06: 0.96 with the 0.8  reached: it lies in       .1 .06
//   pivot .08   .1: 0.9 with the 0.8         reached: it lies in       .1, one value: the Cut
//
// The pivot is the middle of the two values' bits, which order positive floats as numbers do: at
// most 30 passes end at one value, and mostly some ten, over shorter and shorter lists.
//
// A row is one thread's, and its sums are float64 in an order that depends on nothing but the row:
// neither other rows nor the number of threads change a bit.
#pragma once

#include "pool.h"
#include "vec.h"

namespace minisgl {

// Which rows to draw from, and how; filled by Python through ctypes. Parameters are [count].
struct Draws {
  int64_t count;
  const float* logits;  // rows of `vocab` values, `stride` apart
  int64_t stride;
  const int64_t* rows;
  const float* temperature;
  const int64_t* top_k;  // below 1, or the whole vocabulary and more: off
  const float *top_p, *min_p;  // 1 and 0: off
  const double* uniform;  // [0, 1)
};

// The memory and the passes of one thread.
class RowDrawer {
 public:
  explicit RowDrawer(int64_t vocab);

  // The token whose part of the cumulative distribution, in the order of ids, holds `uniform`.
  // It never has probability 0, as what lies 126 ln 2 = 87 and more below the largest does.
  // A row with a NaN or +inf, or with nothing above -inf, has no distribution: token 0.
  int64_t draw(const float* logits, float temperature, int64_t top_k, float top_p, float min_p,
               double uniform);

 private:
  struct Cut {
    float value;
    int64_t equal, of;  // how many of those equal to `value` are kept, of how many that there are
  };

  float largest_logit(const float* logits) const;
  void exponentiate(const float* logits, float largest, float temperature);
  Cut cut(int64_t top_k, float top_p, float min_p);
  Cut find(float lowest, double limit, bool by_mass);
  void drop_equal(Cut cut);
  int64_t invert(float lowest, double uniform);

  const int64_t vocab_;
  Buffer<float> p_;  // by id, the largest is 1; zeros to the end of the last block
  float least_;      // the smallest above 0
  Buffer<float> values_;        // those among which `find` still looks
  std::vector<double> masses_;  // of each block, what is kept of it
};

class Drawer {
 public:
  Drawer(int threads, int64_t vocab);

  void draw(Pool& pool, const Draws& draws, int64_t* tokens);

 private:
  std::vector<RowDrawer> of_thread_;
};

// A number in [0, 1) for (seed, position, choice): `kernel/sampling.py` has the same in PyTorch.
double philox_uniform(int64_t seed, int64_t position, int64_t choice);

}  // namespace minisgl
