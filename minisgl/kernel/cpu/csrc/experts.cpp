#include "experts.h"

namespace minisgl {

namespace {

constexpr float kNone = -1e30f;  // exp gives 0

// The indices of the k largest of n values, the largest first, of equal ones the lowest index. Any
// k if there are NaNs, which are larger than nothing.
void choose_largest(const float* x, int n, int k, int32_t* best) {
  for (int id = 0, found = 0; id < n; ++id) {
    int at = found;  // those before it are at least as large
    while (at > 0 && x[id] > x[best[at - 1]]) --at;
    if (at == k) continue;
    found = std::min(found + 1, k);
    for (int i = found - 1; i > at; --i) best[i] = best[i - 1];
    best[at] = id;
  }
}

// x[i] = exp(x[i] - top) over whole vectors of 16; returns the sum.
float exponentials(float* x, int64_t size, float top) {
  F32x16 total{};
  for (int64_t i = 0; i < size; i += 16) {
    const F32x16 e = exp2(kLog2E * (load(x + i) - top));
    store(x + i, e);
    total += e;
  }
  return sum(total);
}

// to[j] += weight * from[j] for a panel's columns.
void add_weighted(const float* from, float weight, int columns, float* to) {
  if (columns == kPanel) {
    for (int j = 0; j < kPanel; j += 16) store(to + j, fma(load(from + j), splat(weight), load(to + j)));
  } else {
    for (int j = 0; j < columns; ++j) to[j] += weight * from[j];
  }
}

}  // namespace

void Mixture::require(const Experts& experts, Forms& forms) {
  forms.require(experts.router);
  each_ = std::max(each_, experts.chosen + experts.shared);
  outputs_ = std::max<int64_t>(outputs_, experts.router.outputs());
  for (int i = 0; i < experts.count + experts.shared; ++i) {
    forms.require(experts.gate_up[i]);
    gathered_forms_.require(experts.gate_up[i]);
    inner_forms_.require(experts.down[i]);
  }
}

void Mixture::make(int64_t rows) {
  rows_ = rows;
  const int64_t pairs = rows * each_;
  gathered_ = gathered_forms_.make(pairs);
  inner_ = inner_forms_.make(pairs);
  grow(logits_, rows * outputs_);
  grow(ids_, pairs);
  grow(weights_, pairs);
  grow(tokens_, pairs);
  grow(pair_weights_, pairs);
}

void Mixture::run(Team& team, const Experts& experts, const Input& x, float* out) {
  multiply(team, experts.router, x, rows_, logits_.data(), false);
  team.wait();
  choose(team, experts);
  team.wait();
  if (team.id() == 0) sort(experts);
  team.wait();
  team.split(rows_ * (experts.chosen + experts.shared), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) copy_row(x, tokens_[i], gathered_, i);
  });
  team.wait();
  gate(team, experts);
  team.wait();
  add_down(team, experts, out);
}

// Each token's experts and their weights: the softmax over all experts, of which k are taken.
void Mixture::choose(Team& team, const Experts& experts) {
  const int k = experts.chosen, each = k + experts.shared, outputs = experts.count + experts.shared;
  team.split(rows_, [&](int64_t begin, int64_t end) {
    Buffer<float> scores(round_up(experts.count, 16));
    for (int64_t t = begin; t < end; ++t) {
      const float* logits = logits_.data() + t * outputs;
      int32_t* ids = ids_.data() + t * each;
      float* weights = weights_.data() + t * each;
      choose_largest(logits, experts.count, k, ids);
      std::fill(std::copy(logits, logits + experts.count, scores.begin()), scores.end(), kNone);
      float total = exponentials(scores.data(), int64_t(scores.size()), logits[ids[0]]);
      if (experts.renormalize) {
        total = 0;
        for (int j = 0; j < k; ++j) total += scores[ids[j]];
      }
      // A score of no expert's: the softmax over all has no number then, whoever is chosen.
      for (int id = 0; id < experts.count; ++id)
        if (logits[id] != logits[id]) total = logits[id];
      for (int j = 0; j < k; ++j) weights[j] = scores[ids[j]] / total;
      if (experts.shared) {
        ids[k] = experts.count;
        weights[k] = 1.0f / (1.0f + std::exp(-logits[experts.count]));
      }
    }
  });
}

// The pairs by expert, and the experts that have any.
void Mixture::sort(const Experts& experts) {
  const int count = experts.count + experts.shared, each = experts.chosen + experts.shared;
  places_.assign(count + 1, 0);
  for (int64_t i = 0; i < rows_ * each; ++i) ++places_[ids_[i] + 1];
  groups_.clear();
  int64_t items = 0;
  for (int id = 0; id < count; ++id) {
    const int64_t rows = places_[id + 1], first = places_[id], begin = items;
    places_[id + 1] += first;
    if (rows == 0) continue;
    items += experts.gate_up[id].weights[0].panels() * Tiles(rows).parts;
    groups_.push_back({id, first, rows, begin, items});
  }
  for (int64_t i = 0; i < rows_ * each; ++i) {
    const int64_t place = places_[ids_[i]]++;
    tokens_[place] = int32_t(i / each);
    pair_weights_[place] = weights_[i];
  }
}

void Mixture::gate(Team& team, const Experts& experts) {
  team.share(groups_.empty() ? 0 : groups_.back().end, [&](int64_t item) {
    const Group& group = *std::upper_bound(
        groups_.begin(), groups_.end(), item, [](int64_t i, const Group& g) { return i < g.end; });
    const Tiles tiles(group.rows);
    item -= group.begin;
    tiles.each_of(item % tiles.parts, [&](int64_t row, int m) {
      gate_panel(experts.gate_up[group.expert], int(item / tiles.parts), act_, gathered_,
                 group.first + row, m, inner_);
    });
  });
}

// An item is some neighbouring panels, one after another in memory, of all experts; and a part of
// the tokens, where there are more threads than panels.
void Mixture::add_down(Team& team, const Experts& experts, float* out) {
  const int64_t panels = (hidden_ + kPanel - 1) / kPanel, wanted = 4 * team.size();
  const int64_t width = std::max<int64_t>(1, panels / wanted), blocks = (panels + width - 1) / width;
  const int64_t parts = std::clamp<int64_t>(wanted / blocks, 1, 1 + rows_ / (8 * kRows));
  team.share(blocks * parts, [&](int64_t item) {
    const int64_t block = item / parts, part = item % parts;
    const auto from = int32_t(rows_ * part / parts), to = int32_t(rows_ * (part + 1) / parts);
    for (const Group& group : groups_) {
      const int32_t *begin = tokens_.data() + group.first, *end = begin + group.rows;
      const int64_t first = std::lower_bound(begin, end, from) - tokens_.data();
      const Tiles tiles(std::lower_bound(begin, end, to) - tokens_.data() - first);
      for (int64_t panel = block * width; panel < std::min(panels, (block + 1) * width); ++panel) {
        tiles.each(0, tiles.count, [&](int64_t row, int m) {
          alignas(64) float c[kRows * kPanel];
          const Linear& down = experts.down[group.expert];
          const Place at = multiply_panel(down, int(panel), inner_, first + row, m, c);
          for (int i = 0; i < m; ++i) {
            const int64_t pair = first + row + i;
            add_weighted(c + i * kPanel, pair_weights_[pair], at.columns,
                         out + tokens_[pair] * int64_t(hidden_) + at.first);
          }
        });
      }
    }
  });
}

}  // namespace minisgl
