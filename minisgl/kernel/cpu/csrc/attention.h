// Attention over the pages of the KV pool, read where they lie.
//
// An item is some consecutive tokens of a request and some of its KV heads, each with the `group` of
// query heads that share it (Ainslie et al. 2023); or the decoding tokens of several requests whose
// first pages are the same, which are then read once for all of them. Keys are taken in blocks of
// 64 that begin at multiples of 64 of the sequence; each is brought into panels once and multiplied
// by the same tiles as weights:
//
//   scores[rows][64] = q[rows][D] x keys      D x 64 as two panels
//   acc[rows][D]     = acc * fix + p[rows][64] x values      64 x D in panels of 32
//
// with the running maximum and sum of the online softmax (Milakov and Gimelshein 2018; as in
// FlashAttention, Dao et al. 2022).
//
// Invariant: what a row computes depends only on its own query and keys. Blocks begin at fixed
// positions, sums have a fixed order, and a block that a row does not see changes nothing in it
// (exp(0) = 1, p = 0), so prefill, chunks and decoding give the same bits.
#pragma once

#include "ops.h"

namespace minisgl {

enum class KVType : int { F32 = 0, BF16 = 1, I8 = 2 };

// One layer's keys and values: [slots][heads][dim]; I8 has a float scale for each [slot][head].
struct KVLayer {
  KVType type;
  int heads, dim, page_size;
  uint8_t *keys, *values;
  float *key_scales, *value_scales;
};

inline int64_t kv_bytes(KVType type) { return type == KVType::F32 ? 4 : type == KVType::BF16 ? 2 : 1; }

// Write one head of one token.
inline void store_kv(KVType type, uint8_t* cache, float* scales, int64_t at, const float* x, int dim) {
  if (type == KVType::F32) {
    std::memcpy(cache + at * dim * 4, x, dim * 4);
  } else if (type == KVType::BF16) {
    bf16* out = (bf16*)cache + at * dim;
    int i = 0;
    for (; i + 16 <= dim; i += 16) store_bf16(out + i, load(x + i));
    for (; i < dim; ++i) out[i] = f32_to_bf16(x[i]);
  } else {
    float top = 0;
    for (int i = 0; i < dim; ++i) top = std::max(top, std::fabs(x[i]));
    scales[at] = top / 127.0f;
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    for (int i = 0; i < dim; ++i) ((int8_t*)cache)[at * dim + i] = int8_t(std::nearbyintf(x[i] * inverse));
  }
}

namespace detail {

constexpr int kKeys = 64;

#ifdef MINISGL_AVX512
// Transpose 16 rows of 16 words: out[j * 32 + i] = rows[i][j], as a panel's half wants it.
inline void transpose16(const uint32_t* const* rows, uint32_t* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + c]: column c of each lane, rows i .. i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const __m512i low0 = _mm512_shuffle_i32x4(a[c], a[c + 4], 0x88);
    const __m512i high0 = _mm512_shuffle_i32x4(a[c], a[c + 4], 0xdd);
    const __m512i low1 = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0x88);
    const __m512i high1 = _mm512_shuffle_i32x4(a[c + 8], a[c + 12], 0xdd);
    _mm512_storeu_si512(out + (c + 0) * 32, _mm512_shuffle_i32x4(low0, low1, 0x88));
    _mm512_storeu_si512(out + (c + 4) * 32, _mm512_shuffle_i32x4(high0, high1, 0x88));
    _mm512_storeu_si512(out + (c + 8) * 32, _mm512_shuffle_i32x4(low0, low1, 0xdd));
    _mm512_storeu_si512(out + (c + 12) * 32, _mm512_shuffle_i32x4(high0, high1, 0xdd));
  }
}
#else
inline void transpose16(const uint32_t* const* rows, uint32_t* out) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) out[j * 32 + i] = rows[i][j];
}
#endif

// Interleave two rows of 32 bf16: out[2 i] = a[i], out[2 i + 1] = b[i].
inline void interleave32(const bf16* a, const bf16* b, bf16* out) {
#ifdef MINISGL_AVX512
  for (int i = 0; i < 32; i += 16) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(a + i)));
    const __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(b + i)));
    _mm512_storeu_si512(out + 2 * i, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
  }
#else
  for (int i = 0; i < 32; ++i) out[2 * i] = a[i], out[2 * i + 1] = b[i];
#endif
}

// out[m][32] = out[m][32] * fix[m] + p[m][64] times a panel of 64 values; rows of `stride`.
template <int M>
void add_values(const bf16* panel, const bf16* p, const float* fix, float* out, int stride) {
  F32x16 acc[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < 2; ++h) acc[m][h] = load(out + m * stride + 16 * h) * fix[m];
  for (int i = 0; i < kKeys / 2; ++i) {
    const U32x16 v0 = load_as<U32x16>(panel + 64 * i), v1 = load_as<U32x16>(panel + 64 * i + 32);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const uint32_t a = load_as<uint32_t>(p + m * kKeys + 2 * i);
      acc[m][0] = dot_bf16(acc[m][0], v0, a);
      acc[m][1] = dot_bf16(acc[m][1], v1, a);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < 2; ++h) store(out + m * stride + 16 * h, acc[m][h]);
}

template <int M>
void add_values(const float* panel, const float* p, const float* fix, float* out, int stride) {
  F32x16 acc[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < 2; ++h) acc[m][h] = load(out + m * stride + 16 * h) * fix[m];
  for (int i = 0; i < kKeys; ++i) {
    const F32x16 v0 = load(panel + 32 * i), v1 = load(panel + 32 * i + 16);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      acc[m][0] = fma(splat(p[m * kKeys + i]), v0, acc[m][0]);
      acc[m][1] = fma(splat(p[m * kKeys + i]), v1, acc[m][1]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
    for (int h = 0; h < 2; ++h) store(out + m * stride + 16 * h, acc[m][h]);
}

#define MINISGL_VALUES(M, E) add_values<M>
template <class E>
inline constexpr void (*kSums[kRows])(const E*, const E*, const float*, float*, int) =
    MINISGL_ROWS(MINISGL_VALUES, E);

}  // namespace detail

// What one thread needs to attend; E is bf16 or float, in which keys, values and p are multiplied.
template <class E>
class Attention {
 public:
  // `dim` is the head's size, `group` the query heads of a KV head, `rows` the most rows at once.
  Attention(int dim, int group, int rows)
      : dim_(dim),
        wide_(int(round_up(dim, kPanel))),
        group_(group),
        queries_(rows * wide_),
        keys_(detail::kKeys * wide_),
        values_(detail::kKeys * wide_),
        staged_((2 * detail::kKeys + 1) * wide_),
        p_(kRows * detail::kKeys),
        acc_(rows * wide_),
        top_(rows),
        totals_(16 * rows) {}

  struct Sequence {
    const int32_t* pages;  // of the request
    int64_t position;      // of the first token
    int tokens;
    const float* q;  // the first token's first query head, after RoPE

    int64_t end() const { return position + tokens; }
  };

  struct Item {
    const Sequence* sequences;
    int count;
    int64_t shared;    // the first keys, a multiple of 64, are the same for all sequences
    int head, heads;   // KV heads [head, head + heads)
    int64_t window;    // 0: all keys
    int64_t q_stride;  // floats from token to token
    float scale;
  };

  // Row (h * tokens + t) * group + g of the result, at `out() + row * wide()`, is head g of the
  // group of KV head h, of token t; `tokens` counts those of all sequences. What `then`, if any,
  // reads first is fetched meanwhile.
  void run(const KVLayer& kv, const Item& item, const Item* then = nullptr) {
    int tokens = 0;
    for (int i = 0; i < item.count; ++i) tokens += item.sequences[i].tokens;
    rows_ = tokens * group_;
    put_queries(item, tokens);
    const int all = item.heads * rows_;
    std::fill(acc_.begin(), acc_.begin() + all * wide_, 0.0f);
    std::fill(top_.begin(), top_.begin() + all, kNone);
    std::fill(totals_.begin(), totals_.begin() + 16 * all, 0.0f);
    for (Block block = first_block(kv, item); block.count;) {
      const Block next = block_after(kv, item, block, then);
      const bool common = block.key < item.shared;
      const int first = common ? 0 : block.row, rows = common ? rows_ : block_rows(item, block);
      const int tiles = (rows + kRows - 1) / kRows;
      ahead_.begin(kv, next, item.heads * (8 + 4 * tiles));
      for (int h = 0; h < item.heads; ++h) {
        bring(kv, item.head + h, block);
        for (int i = 0; i < tiles; ++i) {
          const int row = int(tile_start(rows, tiles, i)), m = int(tile_start(rows, tiles, i + 1)) - row;
          const int64_t position = item.sequences[block.sequence].position;
          if (common) attend<true>(item, block.key, 0, h * rows_ + row, m);
          else if (position + (row + m - 1) / group_ >= block.key)
            attend<false>(item, block.key, position * group_ + row, h * rows_ + first + row, m);
        }
      }
      block = next;
      if (block.of_next) break;
    }
    for (int row = 0; row < all; ++row) {
      const float inverse = 1.0f / sum(load(totals_.data() + 16 * row));
      float* out = acc_.data() + row * wide_;
      for (int i = 0; i < wide_; i += 16) store(out + i, load(out + i) * inverse);
    }
  }

  const float* out() const { return acc_.data(); }
  int wide() const { return wide_; }

 private:
  static constexpr float kNone = -1e30f;  // below every score
  static constexpr bool kBf16 = sizeof(E) == 2;
  static constexpr Type kType = kBf16 ? Type::BF16 : Type::F32;

  Input input(E* data, int64_t stride) {
    Input x;
    x.stride = stride;
    if constexpr (kBf16) x.b16 = data;
    else x.f32 = data;
    return x;
  }

  // A block of 64 keys on the way through an item: where they are.
  struct Block {
    int sequence = 0, row = 0;  // whose keys, and its first row within a head's rows
    int64_t key = 0;
    int head, heads;
    int count = 0;  // keys that are there; 0: the item has no more blocks
    bool of_next = false;  // the first block of the item that follows
    int64_t slots[detail::kKeys];
  };

  void put_queries(const Item& item, int tokens) {
    for (int h = 0; h < item.heads; ++h) {
      E* out = queries_.data() + h * tokens * group_ * wide_;
      for (int i = 0; i < item.count; ++i) {
        const Sequence& s = item.sequences[i];
        for (int t = 0; t < s.tokens; ++t)
          for (int g = 0; g < group_; ++g, out += wide_)
            put_query(s.q + t * item.q_stride + ((item.head + h) * group_ + g) * dim_, out);
      }
    }
  }

  void put_query(const float* q, E* out) {
    int i = 0;
    for (; i + 16 <= dim_; i += 16) {
      if constexpr (kBf16) store_bf16(out + i, load(q + i));
      else store(out + i, load(q + i));
    }
    for (; i < wide_; ++i) {
      const float value = i < dim_ ? q[i] : 0.0f;
      if constexpr (kBf16) out[i] = f32_to_bf16(value);
      else out[i] = value;
    }
  }

  // Of the first block that any of a sequence's tokens sees.
  static int64_t first_key(const Item& item, const Sequence& s) {
    const int64_t seen = item.window ? std::max<int64_t>(0, s.position + 1 - item.window) : 0;
    return seen / detail::kKeys * detail::kKeys;
  }

  int block_rows(const Item& item, const Block& block) const {
    return item.sequences[block.sequence].tokens * group_;
  }

  static Block first_block(const KVLayer& kv, const Item& item) {
    Block block;
    block.key = first_key(item, item.sequences[0]);
    find(kv, item, block);
    return block;
  }

  // All blocks of the shared keys, then what is left of each sequence; after the last one, `then`'s
  // first.
  Block block_after(const KVLayer& kv, const Item& item, const Block& now, const Item* then) const {
    Block block;
    block.sequence = now.sequence;
    block.row = now.row;
    block.key = now.key + detail::kKeys;
    while (block.key >= item.shared && block.key >= item.sequences[block.sequence].end()) {
      block.row += block_rows(item, block);
      if (++block.sequence == item.count) {
        if (!then) return Block{};
        block = first_block(kv, *then);
        block.of_next = true;
        return block;
      }
      block.key = std::max(item.shared, first_key(item, item.sequences[block.sequence]));
    }
    find(kv, item, block);
    return block;
  }

  // The slots of the block's keys, as many as its sequence has.
  static void find(const KVLayer& kv, const Item& item, Block& block) {
    const Sequence& s = item.sequences[block.sequence];
    block.head = item.head;
    block.heads = item.heads;
    block.count = int(std::min<int64_t>(detail::kKeys, s.end() - block.key));
    int64_t page = block.key / kv.page_size, in_page = block.key % kv.page_size;
    for (int i = 0; i < block.count; ++page, in_page = 0) {
      const int64_t slot = int64_t(s.pages[page]) * kv.page_size;
      for (; in_page < kv.page_size && i < block.count; ++in_page) block.slots[i++] = slot + in_page;
    }
  }

  // Where a head of a token is, as E: in the pool itself, or converted to `room`.
  const E* row_of(const KVLayer& kv, const uint8_t* cache, const float* scales, int64_t at, E* room) {
    const uint8_t* data = cache + at * dim_ * kv_bytes(kv.type);
    if (kv.type == KVType::F32 && !kBf16 && wide_ == dim_) return (const E*)data;
    if (kv.type == KVType::BF16 && kBf16 && wide_ == dim_) return (const E*)data;
    const float scale = kv.type == KVType::I8 ? scales[at] : 1.0f;
    int i = 0;
    for (; i + 16 <= dim_; i += 16) {
      F32x16 value;
      if (kv.type == KVType::F32) value = load((const float*)data + i);
      else if (kv.type == KVType::BF16) value = load_bf16((const bf16*)data + i);
      else value = load_i8((const int8_t*)data + i) * scale;
      if constexpr (kBf16) store_bf16(room + i, value);
      else store(room + i, value);
    }
    for (; i < dim_; ++i) {
      float value;
      if (kv.type == KVType::F32) value = ((const float*)data)[i];
      else if (kv.type == KVType::BF16) value = bf16_to_f32(((const bf16*)data)[i]);
      else value = float(((const int8_t*)data)[i]) * scale;
      if constexpr (kBf16) room[i] = f32_to_bf16(value);
      else room[i] = value;
    }
    std::fill(room + dim_, room + wide_, E(0));
    return room;
  }

  // The keys and values of one head of the block as panels, zeros up to 64.
  void bring(const KVLayer& kv, int head, const Block& block) {
    const int count = block.count;
    const E *keys[detail::kKeys], *values[detail::kKeys];
    E* room = staged_.data();
    for (int i = 0; i < count; ++i) {
      const int64_t at = block.slots[i] * kv.heads + head;
      keys[i] = row_of(kv, kv.keys, kv.key_scales, at, room);
      values[i] = row_of(kv, kv.values, kv.value_scales, at, room + wide_);
      if (keys[i] == room) room += 2 * wide_;
    }
    std::fill(room, room + wide_, E(0));
    for (int i = count; i < detail::kKeys; ++i) keys[i] = values[i] = room;
    constexpr int kWord = 4 / sizeof(E);  // values of a head in 32 bits
    for (int i = 0; i < detail::kKeys; i += 16) {
      uint32_t* panel = (uint32_t*)keys_.data() + i / kPanel * (wide_ / kWord) * kPanel + i % kPanel;
      for (int d = 0; d < wide_ / kWord; d += 16) {
        const uint32_t* rows[16];
        for (int j = 0; j < 16; ++j) rows[j] = (const uint32_t*)keys[i + j] + d;
        detail::transpose16(rows, panel + d * kPanel);
      }
      ahead_.fetch();
    }
    for (int d = 0; d < wide_; d += kPanel) {
      ahead_.fetch();
      E* panel = values_.data() + d * detail::kKeys;
      if constexpr (kBf16) {
        for (int i = 0; i < detail::kKeys; i += 2)
          detail::interleave32(values[i] + d, values[i + 1] + d, panel + i * kPanel);
      } else {
        for (int i = 0; i < detail::kKeys; ++i)
          std::memcpy(panel + i * kPanel, values[i] + d, kPanel * sizeof(E));
      }
    }
  }

  // Add the block of keys that begins at `key` to rows [row, row + m). They see `Every` key of it,
  // or those up to their own position, which is (place + i) / group for row i.
  template <bool Every>
  void attend(const Item& item, int64_t key, int64_t place, int row, int m) {
    alignas(64) float scores[2][kRows * kPanel];
    float fix[kRows];
    const Input q = input(queries_.data(), wide_);
    for (int half = 0; half < 2; ++half) {
      const uint8_t* panel = (const uint8_t*)(keys_.data() + half * kPanel * wide_);
      detail::kTiles[int(kType)][m - 1](panel, wide_, q, row, scores[half]);
      ahead_.fetch();
    }
    for (int i = 0; i < m; ++i) {
      int from = 0, to = detail::kKeys;
      if constexpr (!Every) {
        const int64_t own = (place + i) / group_;
        if (item.window) from = int(std::max<int64_t>(0, own + 1 - item.window - key));
        to = int(std::min<int64_t>(detail::kKeys, own + 1 - key));
      }
      fix[i] = soften(scores, i, from, to, item.scale * kLog2E, row + i);
    }
    for (int d = 0; d < wide_; d += kPanel) {
      detail::kSums<E>[m - 1](values_.data() + d * detail::kKeys, p_.data(), fix,
                              acc_.data() + row * wide_ + d, wide_);
      ahead_.fetch();
    }
  }

  // Scores of one row, times `scale` as powers of 2, to p; only keys [from, to) of the block
  // count. Returns what the row's sums so far are to be multiplied by.
  float soften(const float (*scores)[kRows * kPanel], int i, int from, int to, float scale, int row) {
    static constexpr I32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static constexpr int kDegree = kBf16 ? 4 : 6;
    const bool every = from <= 0 && to >= detail::kKeys;
    F32x16 s[4];
    I32x16 seen[4];
    for (int j = 0; j < 4; ++j) {
      s[j] = load(scores[j / 2] + i * kPanel + 16 * (j % 2));
      if (!every) {
        const I32x16 lane = kLanes + 16 * j;
        seen[j] = (lane >= from) & (lane < to);
        s[j] = (F32x16)(((I32x16)s[j] & seen[j]) | ((I32x16)splat(kNone) & ~seen[j]));
      }
    }
    const F32x16 best = max(max(s[0], s[1]), max(s[2], s[3]));
    float fix = 1.0f;
    if (any_above(best, splat(top_[row]))) {  // seldom, after the first blocks
      const float now = largest(best);
      fix = exp2(splat((top_[row] - now) * scale))[0];
      top_[row] = now;
    }
    const F32x16 top = splat(-top_[row] * scale), factor = splat(scale);
    F32x16 total = {};
    E* out = p_.data() + i * detail::kKeys;
    for (int j = 0; j < 4; ++j) {
      F32x16 p = exp2<kDegree>(fma(s[j], factor, top));
      if (!every) p = (F32x16)((I32x16)p & seen[j]);
      total += p;
      if constexpr (kBf16) store_bf16(out + 16 * j, p);
      else store(out + 16 * j, p);
    }
    float* totals = totals_.data() + 16 * row;
    store(totals, fma(load(totals), splat(fix), total));
    return fix;
  }

  // Fetches the next block of keys and values into the cache, some lines at a time, so that
  // memory works while this thread computes.
  class Ahead {
   public:
    void begin(const KVLayer& kv, const Block& block, int calls) {
      const int64_t head_bytes = kv.dim * kv_bytes(kv.type);
      row_bytes_ = block.heads * head_bytes;
      stride_ = kv.heads * head_bytes;
      offset_ = block.head * head_bytes;
      keys_ = kv.keys, values_ = kv.values;
      slots_ = block.slots;
      count_ = block.count;
      next_ = 0;
      each_ = (count_ + calls - 1) / calls;
    }

    void fetch() {
      for (int i = 0; i < each_ && next_ < count_; ++i, ++next_) {
        const int64_t at = slots_[next_] * stride_ + offset_;
        for (int64_t b = 0; b < row_bytes_; b += 64) __builtin_prefetch(keys_ + at + b, 0, 1);
        for (int64_t b = 0; b < row_bytes_; b += 64) __builtin_prefetch(values_ + at + b, 0, 1);
      }
    }

   private:
    const uint8_t *keys_, *values_;
    const int64_t* slots_;
    int64_t row_bytes_, stride_, offset_;
    int count_ = 0, next_ = 0, each_ = 0;
  };

  Ahead ahead_;
  int rows_ = 0;  // of a head
  const int dim_, wide_, group_;
  Buffer<E> queries_, keys_, values_, staged_, p_;
  Buffer<float> acc_, top_, totals_;
};

}  // namespace minisgl
