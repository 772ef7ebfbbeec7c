#include "sample.h"

#include <cfloat>
#include <limits>

namespace minisgl {

namespace {

typedef float F32x8 __attribute__((vector_size(32)));
typedef double F64x8 __attribute__((vector_size(64)));

constexpr int64_t kBlock = 256;  // tokens whose mass is summed on its own
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// 16 values, or at the end of a row what is left and `rest`.
inline F32x16 load_or(const float* p, int64_t left, float rest) {
  if (left >= 16) return load(p);
  F32x16 v = splat(rest);
  std::memcpy(&v, p, left * sizeof(float));
  return v;
}

inline double sum(F64x8 v) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

inline F64x8 load_wide(const float* p) {
  return __builtin_convertvector(load_as<F32x8>(p), F64x8);
}

// The sum of those of n values, a multiple of 16, that are at least `lowest`.
double mass_from(const float* p, int64_t n, float lowest) {
  F64x8 even = {}, odd = {};
  const F64x8 bound = double(lowest) - F64x8{}, zero = {};
  for (int64_t i = 0; i < n; i += 16) {
    const F64x8 a = load_wide(p + i), b = load_wide(p + i + 8);
    even += a >= bound ? a : zero;
    odd += b >= bound ? b : zero;
  }
  return sum(even + odd);
}

// How values lie about a pivot.
struct Parts {
  int64_t above;     // how many
  double mass;       // of those above
  float least, most;  // the least above, the most not above
};

// n is a multiple of 16; zeros at the end belong to nothing.
Parts divide(const float* p, int64_t n, float pivot, bool by_mass) {
  const F32x16 bound = splat(pivot), infinity = splat(kInfinity), zero = {};
  F32x16 least = infinity, most = zero;
  I32x16 count = {};
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 v = load(p + i);
    const I32x16 above = v > bound;
    count -= above;
    least = min(least, above ? v : infinity);
    most = max(most, above ? zero : v);
  }
  int64_t total = 0;
  for (int lane = 0; lane < 16; ++lane) total += count[lane];
  const float next = from_bits(bits_of(pivot) + 1);
  return {total, by_mass ? mass_from(p, n, next) : 0.0, -largest(-least), largest(most)};
}

// Those of n values, a multiple of 16, that lie in [low, high], in their order and then 16 zeros;
// returns how many. `out` may be `p`: what is written was read before.
int64_t gather(const float* p, int64_t n, float low, float high, float* out) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const F32x16 v = load(p + i);
#ifdef MINISGL_AVX512
    const __mmask16 inside =
        _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(low), _CMP_GE_OQ) &
        _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(high), _CMP_LE_OQ);
    store(out + found, (F32x16)_mm512_maskz_compress_ps(inside, (__m512)v));
    found += __builtin_popcount(inside);
#else
    for (int lane = 0; lane < 16; ++lane) {
      out[found] = v[lane];
      found += v[lane] >= low && v[lane] <= high;
    }
#endif
  }
  store(out + found, F32x16{});
  return found;
}

}  // namespace

RowDrawer::RowDrawer(int64_t vocab)
    : vocab_(vocab),
      p_(round_up(vocab, kBlock)),
      values_(round_up(vocab, kBlock) + 16),
      masses_(p_.size() / kBlock) {}

int64_t RowDrawer::draw(const float* logits, float temperature, int64_t top_k, float top_p,
                        float min_p, double uniform) {
  const float largest = largest_logit(logits);
  if (!std::isfinite(largest) || !(temperature > 0)) return 0;
  exponentiate(logits, largest, temperature);
  return invert(end(top_k, top_p, min_p), uniform);
}

// NaN if there is one among them.
float RowDrawer::largest_logit(const float* logits) const {
  F32x16 best = splat(-kInfinity);
  I32x16 strange = {};
  for (int64_t i = 0; i < vocab_; i += 16) {
    const F32x16 v = load_or(logits + i, vocab_ - i, -kInfinity);
    strange |= v != v;
    best = max(best, v);
  }
  for (int lane = 0; lane < 16; ++lane)
    if (strange[lane]) return std::numeric_limits<float>::quiet_NaN();
  return largest(best);
}

void RowDrawer::exponentiate(const float* logits, float largest, float temperature) {
  const F32x16 scale = splat(kLog2E / temperature), top = splat(largest);
  const F32x16 lowest = splat(-126.0f), zero = {};  // no denormals: they are slow
  for (int64_t i = 0; i < vocab_; i += 16) {
    const F32x16 x = (load_or(logits + i, vocab_ - i, -kInfinity) - top) * scale;
    store(&p_[i], x >= lowest ? exp2(x) : zero);
  }
}

// The smallest p that is kept. Of several equal ones at the end, those too many become 0.
float RowDrawer::end(int64_t top_k, float top_p, float min_p) {
  Cut cut{FLT_MIN, vocab_};
  double mass = 0;
  if (top_k > 0 && top_k < vocab_) cut = find(cut.value, double(top_k), false);
  if (top_p < 1) {
    const float above = from_bits(bits_of(cut.value) + 1);
    mass = mass_from(p_.data(), p_.size(), above) + double(cut.value) * cut.equal;
  }
  return mass;
}

}  // namespace minisgl
