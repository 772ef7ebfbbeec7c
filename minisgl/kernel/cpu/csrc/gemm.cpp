// The tiles of gemm.h, for every type and number of rows: compiled here alone.
#include "gemm.h"

namespace minisgl {

namespace {

using namespace detail;

using Tile = void (*)(const uint8_t*, int, const Input&, int64_t, float*);

#define MINISGL_PLAIN(M, name) name<M>
#define MINISGL_QUANT(M, Q, S) tile_quant<Q, M, S>

constexpr Tile kTiles[7][kRows] = {
    MINISGL_ROWS(MINISGL_PLAIN, tile_f32),
    MINISGL_ROWS(MINISGL_PLAIN, tile_bf16),
    MINISGL_ROWS(MINISGL_QUANT, Q8, false),
    MINISGL_ROWS(MINISGL_QUANT, Q4Zero, false),
    MINISGL_ROWS(MINISGL_QUANT, Q4Min, false),
    MINISGL_ROWS(MINISGL_QUANT, Q4K, true),
    MINISGL_ROWS(MINISGL_QUANT, Q6K, true),
};

}  // namespace

void multiply_tile(const Weight& w, int panel, const Input& x, int64_t row, int m, float* c) {
  const uint8_t* data = w.data + panel * panel_bytes(w.type, w.k);
  kTiles[int(w.type)][m - 1](data, w.k, x, row, c);
}

}  // namespace minisgl
