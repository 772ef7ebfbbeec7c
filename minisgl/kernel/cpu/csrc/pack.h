// Bring weights into panels (see weights.h), and read single rows of them back.
#pragma once

#include "gemm.h"

namespace minisgl {

namespace detail {

// The quads of one output's 32 integers (each below 16) as the nibbles of a panel's block.
inline void put_nibbles(uint8_t* b, int n, const uint8_t* q) {
  const int half = n / 16, lane = n % 16;
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < 4; ++i)
      b[j * 128 + half * 64 + lane * 4 + i] = uint8_t(q[4 * j + i] | q[16 + 4 * j + i] << 4);
}

inline uint8_t get_nibble(const uint8_t* b, int n, int i) {
  const int half = n / 16, lane = n % 16, quad = i / 4;
  const uint8_t byte = b[(quad & 3) * 128 + half * 64 + lane * 4 + i % 4];
  return quad < 4 ? byte & 15 : byte >> 4;
}

// GGUF keeps the nibbles of 32 values as 16 bytes: low halves are the first 16 values.
inline void split_nibbles(const uint8_t* bytes, uint8_t* q) {
  for (int i = 0; i < 16; ++i) q[i] = bytes[i] & 15, q[16 + i] = bytes[i] >> 4;
}

// The 6-bit scale and minimum of block j in the 12 bytes of a Q4_K block.
inline void scale_min_k4(const uint8_t* s, int j, uint8_t& scale, uint8_t& low) {
  if (j < 4) {
    scale = s[j] & 63;
    low = s[j + 4] & 63;
  } else {
    scale = uint8_t((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    low = uint8_t((s[j + 4] >> 4) | (s[j] >> 6) << 4);
  }
}

// One row's super-block of Q4_K: f16 d, f16 dmin, 12 bytes of scales, 128 of nibbles.
inline void pack_q4k(const uint8_t* in, int n, uint8_t* s) {
  std::memcpy(s + 2 * n, in, 2);
  std::memcpy(s + 64 + 2 * n, in + 2, 2);
  for (int j = 0; j < 8; ++j) {
    uint8_t* b = s + Q4K::kHead + j * Q4K::kBytes;
    scale_min_k4(in + 4, j, b[n], b[32 + n]);
    uint8_t q[32];  // 32 bytes hold two blocks: low halves the first, high halves the second
    for (int i = 0; i < 32; ++i) {
      const uint8_t byte = in[16 + j / 2 * 32 + i];
      q[i] = j % 2 ? byte >> 4 : byte & 15;
    }
    put_nibbles(b + 64, n, q);
  }
}

// The 256 six-bit integers of a Q6_K block: 128 bytes of low nibbles, 64 of high pairs of bits.
inline void q6k_values(const uint8_t* in, uint8_t* q) {
  for (int part = 0; part < 2; ++part) {
    const uint8_t *low = in + 64 * part, *high = in + 128 + 32 * part;
    for (int i = 0; i < 32; ++i) {
      uint8_t* out = q + 128 * part + i;
      out[0] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
      out[32] = uint8_t((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      out[64] = uint8_t((low[i] >> 4) | (high[i] >> 4 & 3) << 4);
      out[96] = uint8_t((low[i + 32] >> 4) | (high[i] >> 6) << 4);
    }
  }
}

// One row's super-block of Q6_K: the integers, 16 int8 scales, f16 d.
inline void pack_q6k(const uint8_t* in, int n, uint8_t* s) {
  std::memcpy(s + 2 * n, in + 208, 2);
  uint8_t q[256];
  q6k_values(in, q);
  const int half = n / 16, lane = n % 16;
  for (int j = 0; j < 8; ++j) {
    uint8_t* b = s + Q6K::kHead + j * Q6K::kBytes;
    b[n] = in[192 + 2 * j];
    b[32 + n] = in[192 + 2 * j + 1];
    uint8_t low[32];
    for (int i = 0; i < 32; ++i) low[i] = q[32 * j + i] & 15;
    put_nibbles(b + 64, n, low);
    for (int i = 0; i < 32; ++i) {
      uint8_t* byte = b + 576 + (i / 16) * 128 + half * 64 + lane * 4 + i % 4;
      *byte = uint8_t(*byte | (q[32 * j + i] >> 4) << (2 * (i / 4 % 4)));
    }
  }
}

}  // namespace detail

// Write output n of a panel (0 to 31) from a row of plain values or GGUF blocks; the panel is
// zero before.
inline void pack_row(Type type, const uint8_t* row, int n, int64_t k, uint8_t* panel) {
  switch (type) {
    case Type::F32:
      for (int64_t i = 0; i < k; ++i) std::memcpy(panel + (i * kPanel + n) * 4, row + i * 4, 4);
      return;
    case Type::BF16: {
      const int64_t pairs = k / 2;
      uint32_t* out = (uint32_t*)panel + n;
      for (int64_t i = 0; i < pairs; ++i) std::memcpy(out + i * kPanel, row + i * 4, 4);
      if (k % 2) std::memcpy(out + pairs * kPanel, row + pairs * 4, 2);
      return;
    }
    case Type::Q8_0:
      for (int64_t i = 0; i < k / kBlock; ++i, row += 34, panel += detail::Q8::kBytes) {
        std::memcpy(panel + 2 * n, row, 2);
        for (int j = 0; j < 8; ++j)
          for (int c = 0; c < 4; ++c) panel[64 + j * 128 + n * 4 + c] = row[2 + 4 * j + c] ^ 0x80;
      }
      return;
    case Type::Q4_0:
      for (int64_t i = 0; i < k / kBlock; ++i, row += 18, panel += detail::Q4Zero::kBytes) {
        uint8_t q[32];
        std::memcpy(panel + 2 * n, row, 2);
        detail::split_nibbles(row + 2, q);
        detail::put_nibbles(panel + 64, n, q);
      }
      return;
    case Type::Q4_1:
      for (int64_t i = 0; i < k / kBlock; ++i, row += 20, panel += detail::Q4Min::kBytes) {
        uint8_t q[32];
        std::memcpy(panel + 2 * n, row, 2);
        std::memcpy(panel + 64 + 2 * n, row + 2, 2);
        detail::split_nibbles(row + 4, q);
        detail::put_nibbles(panel + 128, n, q);
      }
      return;
    case Type::Q4_K:
      for (int64_t i = 0; i < k / kSuper; ++i, row += 144, panel += 128 + 8 * detail::Q4K::kBytes)
        detail::pack_q4k(row, n, panel);
      return;
    case Type::Q6_K:
      for (int64_t i = 0; i < k / kSuper; ++i, row += 210, panel += 64 + 8 * detail::Q6K::kBytes)
        detail::pack_q6k(row, n, panel);
      return;
  }
}

// Panel number `panel` of n rows at `rows`, `stride` bytes apart.
inline void pack_panel(Type type, const uint8_t* rows, int64_t stride, int n, int64_t k, int panel,
                       uint8_t* out) {
  const int first = panel * kPanel, count = std::min(kPanel, n - first);
  if (count < kPanel || type == Type::Q6_K) std::memset(out, 0, panel_bytes(type, k));
  for (int i = 0; i < count; ++i) pack_row(type, rows + (first + i) * stride, i, k, out);
}

// Row `id` of packed weights as k floats: what an embedding looks up.
inline void unpack_row(const Weight& w, int64_t id, float* out) {
  using namespace detail;
  const uint8_t* p = w.data + id / kPanel * panel_bytes(w.type, w.k);
  const int n = int(id % kPanel);
  for (int i = 0; i < w.k; ++i) {
    const int block = i / kBlock, at = i % kBlock;
    switch (w.type) {
      case Type::F32: out[i] = ((const float*)p)[i * kPanel + n]; break;
      case Type::BF16: out[i] = bf16_to_f32(((const bf16*)p)[(i / 2 * kPanel + n) * 2 + i % 2]); break;
      case Type::Q8_0: {
        const uint8_t* b = p + block * Q8::kBytes;
        out[i] = f16_to_f32(((const f16*)b)[n]) * float(int(b[64 + at / 4 * 128 + n * 4 + at % 4]) - 128);
        break;
      }
      case Type::Q4_0: {
        const uint8_t* b = p + block * Q4Zero::kBytes;
        out[i] = f16_to_f32(((const f16*)b)[n]) * float(get_nibble(b + 64, n, at) - 8);
        break;
      }
      case Type::Q4_1: {
        const uint8_t* b = p + block * Q4Min::kBytes;
        out[i] = f16_to_f32(((const f16*)b)[n]) * float(get_nibble(b + 128, n, at)) +
                 f16_to_f32(((const f16*)b)[32 + n]);
        break;
      }
      case Type::Q4_K: {
        const uint8_t* s = p + i / kSuper * (Q4K::kHead + 8 * Q4K::kBytes);
        const uint8_t* b = s + Q4K::kHead + block % 8 * Q4K::kBytes;
        out[i] = f16_to_f32(((const f16*)s)[n]) * float(b[n]) * float(get_nibble(b + 64, n, at)) -
                 f16_to_f32(((const f16*)s)[32 + n]) * float(b[32 + n]);
        break;
      }
      case Type::Q6_K: {
        const uint8_t* s = p + i / kSuper * (Q6K::kHead + 8 * Q6K::kBytes);
        const uint8_t* b = s + Q6K::kHead + block % 8 * Q6K::kBytes;
        const uint8_t high = b[576 + at / 16 * 128 + n * 4 + at % 4];
        const int q = get_nibble(b + 64, n, at) | (high >> (2 * (at / 4 % 4)) & 3) << 4;
        out[i] = f16_to_f32(((const f16*)s)[n]) * float(((const int8_t*)b)[at / 16 * 32 + n]) *
                 float(q - 32);
        break;
      }
    }
  }
}

}  // namespace minisgl
