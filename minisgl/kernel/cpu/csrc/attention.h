// Attention over the pages of the KV pool, read where they lie.
//
// An item is some consecutive tokens of a request and some of its KV heads, each with the `group` of
// query heads that share it (Ainslie et al. 2023); or the decoding tokens of several requests whose
// first pages are the same, which are then read once for all of them. Keys are taken in blocks of
// 64 that begin at multiples of 64 of the sequence:
//
//   scores[rows][64] = q[rows][D] x keys                     four panels (see kv.h)
//   acc[rows][D]     = acc * fix + p[rows][64] x values
//
// with the running maximum and sum of the online softmax (Milakov and Gimelshein 2018; as in
// FlashAttention, Dao et al. 2022).
//
// Invariant: what a row computes depends only on its own query and keys. Blocks begin at fixed
// positions, sums have a fixed order, and a block that a row does not see changes nothing in it
// (exp(0) = 1, p = 0), so prefill, chunks and decoding give the same bits, as long as the request's
// values are finite.
#pragma once

#include "kv.h"

namespace minisgl {

namespace detail {

constexpr int kPanels = 4;                  // of a block
constexpr int kBlockKeys = kPanels * kKeys;

template <class E>
inline F32x16 dot(F32x16 acc, const E* panel, const E* x) {  // w keys or dimensions at once
  if constexpr (sizeof(E) == 2) return dot_bf16(acc, load_as<U32x16>(panel), load_as<uint32_t>(x));
  else return fma(load(panel), splat(*x), acc);
}

// out[m][64] = q[m][wide] times four panels of keys.
template <class E, int M>
void score_tile(const E* const* panels, int wide, const E* q, float* out) {
  constexpr int w = 4 / sizeof(E), kAtOnce = M <= 6 ? 4 : 2;
  for (int n = 0; n < kPanels; n += kAtOnce) {
    F32x16 acc[M][kAtOnce] = {};
    for (int d = 0; d < wide; d += w) {
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int j = 0; j < kAtOnce; ++j)
          acc[m][j] = dot(acc[m][j], panels[n + j] + d * kKeys, q + m * wide + d);
    }
    for (int m = 0; m < M; ++m)
      for (int j = 0; j < kAtOnce; ++j) store(out + m * kBlockKeys + (n + j) * 16, acc[m][j]);
  }
}

// out[m][wide] = out * fix[m] + p[m][64] times four panels of values.
template <class E, int M>
void value_tile(const E* const* panels, int wide, const E* p, const float* fix, float* out) {
  constexpr int w = 4 / sizeof(E);
  for (int d = 0; d < wide; d += kPanel) {
    F32x16 acc[M][2];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
      for (int h = 0; h < 2; ++h) acc[m][h] = load(out + m * wide + d + 16 * h) * fix[m];
    for (int n = 0; n < kPanels; ++n) {
      for (int i = 0; i < kKeys; i += w) {
        const E* v = panels[n] + i * wide + d * w;
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const E* x = p + m * kBlockKeys + n * kKeys + i;
          acc[m][0] = dot(acc[m][0], v, x);
          acc[m][1] = dot(acc[m][1], v + 16 * w, x);
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
      for (int h = 0; h < 2; ++h) store(out + m * wide + d + 16 * h, acc[m][h]);
  }
}

#define MINISGL_SCORE(M, E) score_tile<E, M>
#define MINISGL_VALUE(M, E) value_tile<E, M>
template <class E>
inline constexpr void (*kScores[kRows])(const E* const*, int, const E*, float*) =
    MINISGL_ROWS(MINISGL_SCORE, E);
template <class E>
inline constexpr void (*kValues[kRows])(const E* const*, int, const E*, const float*, float*) =
    MINISGL_ROWS(MINISGL_VALUE, E);

}  // namespace detail

// What one thread needs to attend; E is bf16 or float, in which keys, values and p are multiplied.
template <class E>
class Attention {
 public:
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

  // `dim` is the head's size, `group` the query heads of a KV head, `rows` the most rows at once.
  Attention(int dim, int group, int rows)
      : dim_(dim),
        wide_(int(round_up(dim, kPanel))),
        group_(group),
        queries_(rows * wide_),
        room_(2 * detail::kBlockKeys * wide_),
        zeros_(kKeys * wide_),
        p_(kRows * detail::kBlockKeys),
        acc_(rows * wide_),
        top_(rows),
        totals_(16 * rows),
        maker_(wide_) {}

  // Row (h * tokens + t) * group + g of the result, at `out() + row * wide()`, is head g of the
  // group of KV head h, of token t; `tokens` counts those of all sequences. What `then`, if any,
  // reads first is fetched meanwhile.
  void run(const KVLayer& kv, const Item& item, const Item* then = nullptr) {
    int tokens = 0;
    for (int i = 0; i < item.count; ++i) tokens += item.sequences[i].tokens;
    const int rows = tokens * group_, all = item.heads * rows;
    put_queries(item, tokens);
    std::fill(acc_.begin(), acc_.begin() + all * wide_, 0.0f);
    std::fill(top_.begin(), top_.begin() + all, kNone);
    std::fill(totals_.begin(), totals_.begin() + 16 * all, 0.0f);
    for (Block block = first_block(kv, item); block.count;) {
      const Block next = block_after(kv, item, block, then);
      attend_block(kv, item, block, next, rows);
      if (next.of_next) break;
      block = next;
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

  // A block of keys on the way through an item: where they are.
  struct Block {
    int sequence = 0, row = 0;  // whose keys, and its first row within a head's rows
    int64_t key = 0;
    int head, heads;
    int count = 0;         // keys that are there; 0: the item has no more blocks
    bool of_next = false;  // the first block of the item that follows
    int64_t slots[detail::kBlockKeys];
  };

  // Fetches the next block into the cache, some lines at a time, so that memory works while this
  // thread computes.
  class Ahead {
   public:
    void begin(const KVLayer& kv, const Block& block, int calls) {
      kv_ = &kv;
      block_ = &block;
      each_ = kv.panels ? kKeys : 1;
      bytes_ = block.heads * kv.head_bytes();
      unit_ = byte_ = 0;
      const int units = (block.count + each_ - 1) / each_;
      lines_ = int((units * bytes_ / 64 + calls) / calls);
    }

    void fetch() {
      for (int i = 0; i < lines_ && unit_ < block_->count; ++i) {
        const int64_t at = kv_->at(block_->slots[unit_], block_->head) + byte_;
        __builtin_prefetch(kv_->keys + at, 0, 1);
        __builtin_prefetch(kv_->values + at, 0, 1);
        if ((byte_ += 64) >= bytes_) byte_ = 0, unit_ += each_;
      }
    }

   private:
    const KVLayer* kv_;
    const Block* block_;
    int64_t bytes_ = 0, byte_ = 0;
    int unit_ = 0, each_ = 1, lines_ = 0;
  };

  void put_queries(const Item& item, int tokens) {
    for (int h = 0; h < item.heads; ++h) {
      E* out = queries_.data() + h * tokens * group_ * wide_;
      for (int i = 0; i < item.count; ++i) {
        const Sequence& s = item.sequences[i];
        for (int t = 0; t < s.tokens; ++t)
          for (int g = 0; g < group_; ++g, out += wide_) {
            const float* q = s.q + t * item.q_stride + ((item.head + h) * group_ + g) * dim_;
            detail::get_row(KVType::F32, (const uint8_t*)q, 1.0f, dim_, wide_, out);
          }
      }
    }
  }

  // Of the first block that any of a sequence's tokens sees.
  static int64_t first_key(const Item& item, const Sequence& s) {
    const int64_t seen = item.window ? std::max<int64_t>(0, s.position + 1 - item.window) : 0;
    return seen / detail::kBlockKeys * detail::kBlockKeys;
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
    block.key = now.key + detail::kBlockKeys;
    while (block.key >= item.shared && block.key >= item.sequences[block.sequence].end()) {
      block.row += item.sequences[block.sequence].tokens * group_;
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
    block.count = int(std::min<int64_t>(detail::kBlockKeys, s.end() - block.key));
    int64_t page = block.key / kv.page_size, in_page = block.key % kv.page_size;
    for (int i = 0; i < block.count; ++page, in_page = 0) {
      const int64_t slot = int64_t(s.pages[page]) * kv.page_size;
      for (; in_page < kv.page_size && i < block.count; ++in_page) block.slots[i++] = slot + in_page;
    }
  }

  // Add a block to the rows that see it: all if its keys are shared, else those of its sequence.
  void attend_block(const KVLayer& kv, const Item& item, const Block& block, const Block& next, int all) {
    const Sequence& s = item.sequences[block.sequence];
    const bool common = block.key < item.shared;
    const int first = common ? 0 : block.row, rows = common ? all : s.tokens * group_;
    const int tiles = (rows + kRows - 1) / kRows;
    ahead_.begin(kv, next, item.heads * (1 + 3 * tiles));
    for (int h = 0; h < item.heads; ++h) {
      take_panels(kv, item.head + h, block);
      ahead_.fetch();
      for (int i = 0; i < tiles; ++i) {
        const int row = int(tile_start(rows, tiles, i)), m = int(tile_start(rows, tiles, i + 1)) - row;
        const int64_t place = s.position * group_ + row;  // over group_: the row's position
        if (!common && (place + m - 1) / group_ < block.key) continue;
        attend(item, block.key, common ? -1 : place, h * all + first + row, m);
      }
    }
  }

  // Where one head's panels are: in the pool, or made of its rows.
  void take_panels(const KVLayer& kv, int head, const Block& block) {
    for (int n = 0; n < detail::kPanels; ++n) {
      const int count = std::min(kKeys, block.count - n * kKeys);
      if (count <= 0) {
        keys_[n] = values_[n] = zeros_.data();
        continue;
      }
      const int64_t* slots = block.slots + n * kKeys;
      if (kv.panels) {
        keys_[n] = (const E*)(kv.keys + kv.at(slots[0], head));
        values_[n] = (const E*)(kv.values + kv.at(slots[0], head));
      } else {
        E* room = room_.data() + 2 * n * kKeys * wide_;
        maker_.keys(kv, head, slots, count, room);
        maker_.values(kv, head, slots, count, room + kKeys * wide_);
        keys_[n] = room;
        values_[n] = room + kKeys * wide_;
      }
    }
  }

  // Add the block of keys that begins at `key` to rows [row, row + m). They see all of it if
  // `place` is -1, else keys up to their own position, which is (place + i) / group for row i.
  void attend(const Item& item, int64_t key, int64_t place, int row, int m) {
    alignas(64) float scores[kRows * detail::kBlockKeys];
    float fix[kRows];
    detail::kScores<E>[m - 1](keys_, wide_, queries_.data() + row * wide_, scores);
    ahead_.fetch();
    for (int i = 0; i < m; ++i) {
      int from = 0, to = detail::kBlockKeys;
      if (place >= 0) {
        const int64_t own = (place + i) / group_;
        if (item.window) from = int(std::max<int64_t>(0, own + 1 - item.window - key));
        to = int(std::min<int64_t>(detail::kBlockKeys, own + 1 - key));
      }
      fix[i] = soften(scores + i * detail::kBlockKeys, p_.data() + i * detail::kBlockKeys, from, to,
                      item.scale * kLog2E, row + i);
    }
    ahead_.fetch();
    detail::kValues<E>[m - 1](values_, wide_, p_.data(), fix, acc_.data() + row * wide_);
    ahead_.fetch();
  }

  // Scores of one row, times `scale` as powers of 2, to p; only keys [from, to) of the block
  // count. Returns what the row's sums so far are to be multiplied by.
  float soften(const float* scores, E* out, int from, int to, float scale, int row) {
    static constexpr I32x16 kLanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    static constexpr int kDegree = kBf16 ? 4 : 6;
    const bool every = from <= 0 && to >= detail::kBlockKeys;
    F32x16 s[4];
    I32x16 seen[4];
    for (int j = 0; j < 4; ++j) {
      s[j] = load(scores + 16 * j);
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

  Ahead ahead_;
  const E *keys_[detail::kPanels], *values_[detail::kPanels];
  const int dim_, wide_, group_;  // wide: a multiple of 32
  Buffer<E> queries_, room_, zeros_, p_;
  Buffer<float> acc_, top_, totals_;
  PanelMaker<E> maker_;
};

}  // namespace minisgl
