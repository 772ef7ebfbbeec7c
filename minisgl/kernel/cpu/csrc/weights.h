// Weights [N, K] in panels of 32 outputs, laid out in the order in which they are multiplied.
//
//   f32    [panel][k][32]                                      4 bytes a weight
//   bf16   [panel][k / 2][32][2]                               pairs for the bf16 dot product
//   Q8_0   [panel][k / 32] { f16 d[32]; u8 q[8][32][4] }       quads for the int8 dot product
//   Q4_0   [panel][k / 32] { f16 d[32]; nibbles }
//   Q4_1   [panel][k / 32] { f16 d[32]; f16 m[32]; nibbles }
//   Q4_K   [panel][k / 256] { f16 d[32]; f16 m[32]; 8 x { u8 d[32]; u8 m[32]; nibbles } }
//   Q6_K   [panel][k / 256] { f16 d[32]; 8 x { i8 d[2][32]; nibbles; pairs of bits } }
//
// The quantized ones hold the same integers and scales as GGUF's blocks of those names, in the
// same number of bytes (Q4_K: 74 instead of 72 for 128 weights). Nibbles of 32 k and 32 outputs,
// as four vectors for each 16 outputs: the low halves are the quads 0 to 3, the high ones 4 to 7.
// Missing outputs and k are zero weights.
#pragma once

#include "vec.h"

namespace minisgl {

constexpr int kPanel = 32;
constexpr int kBlock = 32;   // k that share an activation's scale
constexpr int kSuper = 256;  // k of a K-quant's block

enum class Type : int { F32 = 0, BF16 = 1, Q8_0 = 2, Q4_0 = 3, Q4_1 = 4, Q4_K = 5, Q6_K = 6 };

constexpr bool is_quantized(Type t) { return t >= Type::Q8_0; }

struct Weight {
  Type type;
  int n, k;
  const uint8_t* data;

  int panels() const { return (n + kPanel - 1) / kPanel; }
};

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Bytes of one panel with k inputs.
inline int64_t panel_bytes(Type type, int64_t k) {
  switch (type) {
    case Type::F32: return k * kPanel * 4;
    case Type::BF16: return round_up(k, 2) * kPanel * 2;
    case Type::Q8_0: return k / kBlock * (64 + 1024);
    case Type::Q4_0: return k / kBlock * (64 + 512);
    case Type::Q4_1: return k / kBlock * (128 + 512);
    case Type::Q4_K: return k / kSuper * (128 + 8 * (64 + 512));
    case Type::Q6_K: return k / kSuper * (64 + 8 * (64 + 512 + 256));
  }
  return 0;
}

}  // namespace minisgl
