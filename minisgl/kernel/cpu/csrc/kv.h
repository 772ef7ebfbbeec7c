// Keys and values in the pool's pages, and as the panels that attention multiplies.
//
// A panel has 16 keys or values of one KV head, of E (bf16 or float) with w = 4 / sizeof(E):
//
//   keys    [D / w][16][w]      one vector: the same w dimensions of 16 keys
//   values  [16 / w][D][w]      one vector: 16 dimensions of the same w keys
//
// Pools of type E whose pages are whole panels hold them as they are, [slot / 16][head][panel]: a
// step multiplies what lies in memory. Other pools (8 bits, other page sizes or types, heads that
// no vector divides) hold rows, [slot][head][D], which are brought into panels when they are read.
#pragma once

#include "ops.h"

namespace minisgl {

constexpr int kKeys = 16;  // of a panel

enum class KVType : int { F32 = 0, BF16 = 1, I8 = 2 };

inline int64_t kv_bytes(KVType type) { return type == KVType::F32 ? 4 : type == KVType::BF16 ? 2 : 1; }

// One layer of the pool. I8 has a float scale for each [slot][head].
struct KVLayer {
  KVType type;
  int heads, dim, page_size;
  bool panels;  // else rows
  uint8_t *keys, *values;
  float *key_scales, *value_scales;

  int64_t head_bytes() const { return dim * kv_bytes(type) * (panels ? kKeys : 1); }
  // Where a head of a slot's panel or row begins.
  int64_t at(int64_t slot, int head) const {
    return ((panels ? slot / kKeys : slot) * heads + head) * head_bytes();
  }
};

// Whether a pool of this type holds panels when attention multiplies in `compute`.
inline bool holds_panels(KVType type, Type compute, int dim, int page_size) {
  const bool same = compute == Type::F32 ? type == KVType::F32 : type == KVType::BF16;
  return same && dim % kPanel == 0 && page_size % kKeys == 0;
}

namespace detail {

inline void put_row(KVType type, uint8_t* out, float* scale, const float* x, int dim) {
  if (type == KVType::F32) {
    std::memcpy(out, x, dim * 4);
  } else if (type == KVType::BF16) {
    int i = 0;
    for (; i + 16 <= dim; i += 16) store_bf16((bf16*)out + i, load(x + i));
    for (; i < dim; ++i) ((bf16*)out)[i] = f32_to_bf16(x[i]);
  } else {
    float top = 0;
    for (int i = 0; i < dim; ++i) top = std::max(top, std::fabs(x[i]));
    *scale = top / 127.0f;
    const float inverse = top > 1e-36f ? 127.0f / top : 0.0f;  // smaller ones would overflow
    for (int i = 0; i < dim; ++i) {
      const float value = std::nearbyintf(x[i] * inverse);
      ((int8_t*)out)[i] = int8_t(value >= -127.0f && value <= 127.0f ? value : 0.0f);  // not NaN
    }
  }
}

// One key into lane `lane` of its panel, from its row.
inline void put_key(uint32_t* panel, int lane, const uint32_t* row, int words) {
  for (int i = 0; i < words; ++i) panel[i * kKeys + lane] = row[i];
}

template <class E>
void clear_values_after(E* panel, int lane, int dim) {
  constexpr int w = 4 / sizeof(E);
  for (int i = lane + 1; i < kKeys; ++i)
    for (int d = 0; d < dim; ++d) panel[i / w * dim * w + d * w + i % w] = 0;
}

}  // namespace detail

// Write one head of one token. `fresh`: it is the last one of its step, and its panel is new to
// its request: what an earlier owner left behind it is cleared, since 0 * NaN would be NaN.
inline void store_kv(const KVLayer& kv, int64_t slot, int head, const float* key, const float* value,
                     bool fresh) {
  uint8_t *keys = kv.keys + kv.at(slot, head), *values = kv.values + kv.at(slot, head);
  if (!kv.panels) {
    const bool scaled = kv.type == KVType::I8;
    const int64_t at = slot * kv.heads + head;
    detail::put_row(kv.type, keys, scaled ? kv.key_scales + at : nullptr, key, kv.dim);
    detail::put_row(kv.type, values, scaled ? kv.value_scales + at : nullptr, value, kv.dim);
    return;
  }
  alignas(64) uint32_t row[256];
  const int lane = int(slot % kKeys);
  for (int first = 0; first < kv.dim; first += 256) {  // pieces of a large head
    const int n = std::min(256, kv.dim - first);
    const int64_t words = n * kv_bytes(kv.type) / 4, before = first * kv_bytes(kv.type) / 4;
    detail::put_row(kv.type, (uint8_t*)row, nullptr, key + first, n);
    detail::put_key((uint32_t*)keys + before * kKeys, lane, row, int(words));
  }
  for (int first = 0; first < kv.dim; first += 256) {
    const int n = std::min(256, kv.dim - first);
    detail::put_row(kv.type, (uint8_t*)row, nullptr, value + first, n);
    if (kv.type == KVType::BF16) {
      bf16* out = (bf16*)values + lane / 2 * kv.dim * 2 + first * 2 + lane % 2;
      for (int i = 0; i < n; ++i) out[2 * i] = ((bf16*)row)[i];
    } else {
      std::memcpy((float*)values + lane * kv.dim + first, row, n * 4);
    }
  }
  if (!fresh) return;
  if (kv.type == KVType::BF16) detail::clear_values_after((bf16*)values, lane, kv.dim);
  else detail::clear_values_after((float*)values, lane, kv.dim);
}

namespace detail {

// Transpose 16 rows of 16 words: out[j * 16 + i] = rows[i][j].
inline void transpose16(const uint32_t* const* rows, uint32_t* out) {
#ifdef MINISGL_AVX512
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
    _mm512_storeu_si512(out + (c + 0) * 16, _mm512_shuffle_i32x4(low0, low1, 0x88));
    _mm512_storeu_si512(out + (c + 4) * 16, _mm512_shuffle_i32x4(high0, high1, 0x88));
    _mm512_storeu_si512(out + (c + 8) * 16, _mm512_shuffle_i32x4(low0, low1, 0xdd));
    _mm512_storeu_si512(out + (c + 12) * 16, _mm512_shuffle_i32x4(high0, high1, 0xdd));
  }
#else
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) out[j * 16 + i] = rows[i][j];
#endif
}

// Interleave two rows of n bf16, n a multiple of 16: out[2 i] = a[i], out[2 i + 1] = b[i].
inline void interleave(const bf16* a, const bf16* b, int n, bf16* out) {
  for (int i = 0; i < n; i += 16) {
#ifdef MINISGL_AVX512
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(a + i)));
    const __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(b + i)));
    _mm512_storeu_si512(out + 2 * i, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
#else
    for (int j = i; j < i + 16; ++j) out[2 * j] = a[j], out[2 * j + 1] = b[j];
#endif
  }
}

// A row of the pool as `wide` E, zeros beyond the head's size.
template <class E>
void get_row(KVType type, const uint8_t* row, float scale, int dim, int wide, E* out) {
  constexpr bool kBf16 = sizeof(E) == 2;
  int i = 0;
  for (; i + 16 <= dim; i += 16) {
    F32x16 value;
    if (type == KVType::F32) value = load((const float*)row + i);
    else if (type == KVType::BF16) value = load_bf16((const bf16*)row + i);
    else value = load_i8((const int8_t*)row + i) * scale;
    if constexpr (kBf16) store_bf16(out + i, value);
    else store(out + i, value);
  }
  for (; i < dim; ++i) {
    float value;
    if (type == KVType::F32) value = ((const float*)row)[i];
    else if (type == KVType::BF16) value = bf16_to_f32(((const bf16*)row)[i]);
    else value = float(((const int8_t*)row)[i]) * scale;
    if constexpr (kBf16) out[i] = f32_to_bf16(value);
    else out[i] = value;
  }
  std::fill(out + dim, out + wide, E(0));
}

}  // namespace detail

// Makes panels of 16 rows of a pool.
template <class E>
class PanelMaker {
 public:
  explicit PanelMaker(int wide) : wide_(wide), rows_(kKeys * wide) {}

  // The keys or values of one head in `count` slots, zeros beyond them, as a panel of `wide`.
  void keys(const KVLayer& kv, int head, const int64_t* slots, int count, E* panel) {
    gather(kv, kv.keys, kv.key_scales, head, slots, count);
    constexpr int w = 4 / sizeof(E);
    for (int d = 0; d < wide_ / w; d += 16) {
      const uint32_t* rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = (const uint32_t*)(rows_.data() + i * wide_) + d;
      detail::transpose16(rows, (uint32_t*)panel + d * kKeys);
    }
  }

  void values(const KVLayer& kv, int head, const int64_t* slots, int count, E* panel) {
    gather(kv, kv.values, kv.value_scales, head, slots, count);
    if constexpr (sizeof(E) == 2) {
      for (int i = 0; i < kKeys; i += 2)
        detail::interleave(rows_.data() + i * wide_, rows_.data() + (i + 1) * wide_, wide_,
                           panel + i * wide_);
    } else {
      std::copy(rows_.begin(), rows_.end(), panel);
    }
  }

 private:
  void gather(const KVLayer& kv, const uint8_t* cache, const float* scales, int head,
              const int64_t* slots, int count) {
    for (int i = 0; i < count; ++i) {
      const float scale = kv.type == KVType::I8 ? scales[slots[i] * kv.heads + head] : 1.0f;
      detail::get_row(kv.type, cache + kv.at(slots[i], head), scale, kv.dim, wide_,
                      rows_.data() + i * wide_);
    }
    std::fill(rows_.begin() + count * wide_, rows_.end(), E(0));
  }

  const int wide_;
  Buffer<E> rows_;
};

}  // namespace minisgl
