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

// The next larger float of a positive one.
inline float next(float x) { return from_bits(bits_of(x) + 1); }

inline float smallest(F32x16 v) { return -largest(-v); }

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
  return {total, by_mass ? mass_from(p, n, next(pivot)) : 0.0, smallest(least), largest(most)};
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
  const Cut end = cut(top_k, top_p, min_p);
  if (end.equal < end.of) drop_equal(end);
  return invert(end.value, uniform);
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
  const F32x16 scale = splat(std::min(kLog2E / temperature, FLT_MAX)), top = splat(largest);
  const F32x16 lowest = splat(-126.0f), one = splat(1.0f), zero = {};
  F32x16 least = one;
  for (int64_t i = 0; i < vocab_; i += 16) {
    const F32x16 x = (load_or(logits + i, vocab_ - i, -kInfinity) - top) * scale;
    const I32x16 normal = x >= lowest;  // denormals would be slow, and are as good as 0
    const F32x16 p = normal ? exp2(x) : zero;
    least = min(least, normal ? p : one);
    store(&p_[i], p);
  }
  least_ = smallest(least);
}

// The end of what all filters keep.
RowDrawer::Cut RowDrawer::cut(int64_t top_k, float top_p, float min_p) {
  Cut cut{least_, vocab_, vocab_};
  if (top_k > 0 && top_k < vocab_) cut = find(least_, double(top_k), false);
  if (top_p < 1) {
    const double all = mass_from(p_.data(), int64_t(p_.size()), cut.value);
    const double mass = all - double(cut.value) * double(cut.of - cut.equal);
    const Cut shorter = find(cut.value, top_p * mass, true);
    // With the same value, `find` looked at all that are equal, of which top_k kept some.
    if (shorter.value > cut.value || shorter.equal < cut.equal) cut = shorter;
  }
  if (min_p > cut.value) cut = {std::min(min_p, 1.0f), vocab_, vocab_};
  return cut;
}

// The end of the fewest most likely values, of those from `lowest` up, whose number or mass
// reaches `limit`: one at least, and all of them if they don't.
RowDrawer::Cut RowDrawer::find(float lowest, double limit, bool by_mass) {
  int64_t n = gather(p_.data(), int64_t(p_.size()), lowest, 1.0f, values_.data());
  float low = lowest, high = 1.0f;  // there is a value of either
  double before = 0;                // what lies above `high`
  while (low < high) {
    const float pivot = from_bits(bits_of(low) + (bits_of(high) - bits_of(low)) / 2);
    const Parts parts = divide(values_.data(), round_up(n, 16), pivot, by_mass);
    const double above = by_mass ? parts.mass : double(parts.above);
    if (before + above >= limit) {
      low = parts.least;
    } else {
      high = parts.most;
      before += above;
    }
    n = gather(values_.data(), round_up(n, 16), low, high, values_.data());
  }
  const double more = std::ceil((limit - before) / (by_mass ? low : 1.0f));
  return {low, int64_t(std::max(1.0, std::min(more, double(n)))), n};
}

// Of the values at the end, those with higher ids than the kept ones become 0.
void RowDrawer::drop_equal(Cut cut) {
  for (float& p : p_) {  // without a branch, which would be guessed wrong half the time
    const bool equal = p == cut.value;
    cut.equal -= equal;
    p = equal && cut.equal < 0 ? 0 : p;
  }
}

int64_t RowDrawer::invert(float lowest, double uniform) {
  double total = 0;
  for (size_t block = 0; block < masses_.size(); ++block)
    total += masses_[block] = mass_from(&p_[block * kBlock], kBlock, lowest);
  const double target = std::max(0.0, uniform * total);
  // A block's sum may pass the target when its values, added one by one, do not: then it is the
  // last of them that is kept. So it is for a `uniform` of 1, which nobody should give.
  size_t last = masses_.size() - 1, block = 0;
  while (masses_[last] == 0) --last;
  double before = 0;
  for (; block < last && before + masses_[block] <= target; ++block) before += masses_[block];
  int64_t token = 0;
  for (int64_t id = block * kBlock; id < int64_t(block + 1) * kBlock; ++id) {
    if (p_[id] < lowest) continue;
    token = id;
    before += p_[id];
    if (before > target) break;
  }
  return token;
}

Drawer::Drawer(int threads, int64_t vocab) : of_thread_(threads, RowDrawer(vocab)) {}

void Drawer::draw(Pool& pool, const Draws& d, int64_t* tokens) {
  auto draw = [&](RowDrawer& row, int64_t i) {
    tokens[i] = row.draw(d.logits + d.rows[i] * d.stride, d.temperature[i], d.top_k[i], d.top_p[i],
                         d.min_p[i], d.uniform[i]);
  };
  if (d.count == 1) return draw(of_thread_[0], 0);  // nothing to wake the other threads for
  pool.run([&](Team& team) {
    team.share(d.count, [&](int64_t i) { draw(of_thread_[team.id()], i); });
  });
}

// Philox4x32-10: the seed is the key, position and choice are the counter.
double philox_uniform(int64_t seed, int64_t position, int64_t choice) {
  uint32_t c[4] = {uint32_t(position), uint32_t(uint64_t(position) >> 32), uint32_t(choice), 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(uint64_t(seed) >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(c[0]) * 0xD2511F53u, b = uint64_t(c[2]) * 0xCD9E8D57u;
    const uint32_t high = uint32_t(b >> 32) ^ c[1] ^ key[0];
    c[2] = uint32_t(a >> 32) ^ c[3] ^ key[1];
    c[0] = high, c[1] = uint32_t(b), c[3] = uint32_t(a);
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  return double(uint64_t(c[0]) << 21 ^ c[1] >> 11) * 0x1p-53;
}

}  // namespace minisgl

using namespace minisgl;

#define MINISGL_API extern "C" __attribute__((visibility("default")))

MINISGL_API Drawer* minisgl_drawer(int threads, int64_t vocab) { return new Drawer(threads, vocab); }
MINISGL_API void minisgl_drawer_free(Drawer* drawer) { delete drawer; }

// One token for each of `draws`; the pool has as many threads as the drawer was made for.
MINISGL_API void minisgl_draw(Drawer* drawer, Pool* pool, const Draws* draws, int64_t* tokens) {
  drawer->draw(*pool, *draws, tokens);
}

MINISGL_API void minisgl_uniform(const int64_t* seeds, const int64_t* positions,
                                 const int64_t* choices, int64_t count, double* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = philox_uniform(seeds[i], positions[i], choices[i]);
}
