#include "model.h"

namespace minisgl {

namespace {

constexpr int kQueryRows = 96;   // of an attention item: keys are brought into panels once for them

}  // namespace

Model::Model(const Sizes& sizes)
    : s_(sizes), layers_(sizes.layer, sizes.layer + sizes.layers), mixture_(s_.hidden, Act(s_.act)) {
  for (const Layer& layer : layers_) {
    normed_forms_.require(layer.qkv);
    context_forms_.require(layer.o);
    if (layer.experts) {
      mixture_.require(*layer.experts, normed_forms_);
    } else {
      normed_forms_.require(layer.gate_up);
      inner_forms_.require(layer.down);
    }
  }
  last_forms_.require(s_.head);
}

void Model::forward(Pool& pool, const Step& step) {
  plan(step, pool.size());
  const int64_t rows = num_tokens();
  const int group = s_.q_heads / s_.kv_heads, most = std::max(kQueryRows, group);
  grow(x_, rows * s_.hidden);
  grow(qkv_, rows * (s_.q_heads + 2 * s_.kv_heads) * s_.dim);
  grow(attended_, rows * s_.q_heads * s_.dim);
  normed_ = normed_forms_.make(rows);
  context_ = context_forms_.make(rows);
  inner_ = inner_forms_.make(rows);
  mixture_.make(rows);
  const bool wide = Type(s_.compute) == Type::F32;
  while (wide && int(attention_f32_.size()) < pool.size())
    attention_f32_.push_back(std::make_unique<Attention<float>>(s_.dim, group, most));
  while (!wide && int(attention_bf16_.size()) < pool.size())
    attention_bf16_.push_back(std::make_unique<Attention<bf16>>(s_.dim, group, most));
  pool.run([&](Team& team) {
    if (wide) run(team, *attention_f32_[team.id()]);
    else run(team, *attention_bf16_[team.id()]);
  });
}

// The tokens, and what of their attention is computed at once.
void Model::plan(const Step& step, int threads) {
  step_ = step;
  tokens_.clear();
  items_.clear();
  for (int64_t r = 0; r < step.count; ++r)
    for (int64_t i = step.cached[r]; i < step.lengths[r]; ++i) tokens_.push_back({r, i});
  int64_t first = 0, decodes = 0;  // those that end before request r
  for (int64_t r = 0; r <= step.count; ++r) {
    const int64_t n = r < step.count ? step.lengths[r] - step.cached[r] : 0;
    if (n == 1) {
      ++decodes;
    } else {
      plan_decodes(r - decodes, first - decodes, decodes, threads);
      decodes = 0;
      if (n > 1) plan_prefill(r, first);
    }
    first += n;
  }
}

// A prompt's chunk in pieces, the ones with the most keys first.
void Model::plan_prefill(int64_t request, int64_t first) {
  const int most = std::max(1, kQueryRows / (s_.q_heads / s_.kv_heads));
  for (int64_t end = step_.lengths[request] - step_.cached[request]; end > 0;) {
    const int count = int(std::min<int64_t>(most, end));
    end -= count;
    for (int head = 0; head < s_.kv_heads; ++head)
      items_.push_back({request, first + end, 1, count, head, 1, 0});
  }
}

// Decoding requests that follow each other. Those that share their first pages go together; and a
// single one's heads, as they lie in memory, if that leaves enough items for all threads.
void Model::plan_decodes(int64_t request, int64_t first, int64_t count, int threads) {
  const int group = s_.q_heads / s_.kv_heads;
  const int64_t groups = (4 * threads + s_.kv_heads - 1) / s_.kv_heads;
  const int64_t most = std::min<int64_t>(kQueryRows / group, (count + groups - 1) / groups);
  const bool together = count >= 8 * threads && s_.q_heads <= kQueryRows;
  bool windowed = false;
  for (const Layer& layer : layers_) windowed |= layer.window != 0;
  for (int64_t i = 0; i < count;) {
    int n = 1;
    int64_t shared = 0;
    for (; !windowed && i + n < count && n < most; ++n) {
      const int64_t same = same_keys(request + i, request + i + n);
      if (same < 2 * detail::kBlockKeys || same < shared / 2) break;
      shared = n == 1 ? same : std::min(shared, same);
    }
    const int heads = n == 1 && together ? s_.kv_heads : 1;
    for (int head = 0; head < s_.kv_heads; head += heads)
      items_.push_back({request + i, first + i, n, n, head, heads, shared});
    i += n;
  }
}

// How many of their first keys two decoding requests read from the same pages, in whole blocks.
int64_t Model::same_keys(int64_t a, int64_t b) const {
  const int32_t* x = step_.pages + step_.rows[a] * step_.page_stride;
  const int32_t* y = step_.pages + step_.rows[b] * step_.page_stride;
  const int64_t pages = std::min(step_.cached[a], step_.cached[b]) / s_.page_size;
  int64_t same = 0;
  while (same < pages && x[same] == y[same]) ++same;
  return same * s_.page_size / detail::kBlockKeys * detail::kBlockKeys;
}

template <class E>
void Model::run(Team& team, Attention<E>& attention) {
  embed(team);
  team.wait();
  for (const Layer& layer : layers_) {
    normalize(team, layer.input_norm);
    team.wait();
    multiply(team, layer.qkv, normed_, num_tokens(), qkv_.data(), false);
    team.wait();
    rotate_and_store(team, layer);
    team.wait();
    attend(team, layer, attention);
    team.wait();
    multiply(team, layer.o, context_, num_tokens(), x_.data(), true);
    team.wait();
    normalize(team, layer.post_norm);
    team.wait();
    mlp(team, layer);
    team.wait();
  }
}

void Model::embed(Team& team) {
  team.split(num_tokens(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Token& t = tokens_[i];
      const int32_t id = step_.tokens[step_.rows[t.request] * step_.token_stride + t.position];
      unpack_row(s_.embedding, id, x_.data() + i * s_.hidden);
    }
  });
}

void Model::normalize(Team& team, const float* weight) {
  team.split(num_tokens(), [&](int64_t begin, int64_t end) {
    Buffer<float> row(s_.hidden);
    for (int64_t i = begin; i < end; ++i) {
      rmsnorm(x_.data() + i * s_.hidden, weight, s_.eps, s_.hidden, row.data());
      put_row(normed_, i, row.data(), s_.hidden);
    }
  });
}

void Model::mlp(Team& team, const Layer& layer) {
  if (layer.experts) return mixture_.run(team, *layer.experts, normed_, x_.data());
  const Linear& gate_up = layer.gate_up;
  for_panels(team, gate_up.weights[0].panels(), num_tokens(), [&](int panel, int64_t row, int m) {
    gate_panel(gate_up, panel, Act(s_.act), normed_, row, m, inner_);
  });
  team.wait();
  multiply(team, layer.down, inner_, num_tokens(), x_.data(), true);
}

void Model::rotate_and_store(Team& team, const Layer& layer) {
  const int q_size = s_.q_heads * s_.dim, kv_size = s_.kv_heads * s_.dim;
  const KVLayer kv = kv_layer(layer);
  team.split(num_tokens(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Token& t = tokens_[i];
      float* row = qkv_.data() + i * (q_size + 2 * kv_size);
      for (int h = 0; h < s_.q_heads + s_.kv_heads; ++h) {
        float* head = row + h * s_.dim;
        const float* norm = h < s_.q_heads ? layer.q_norm : layer.k_norm;
        if (norm) rmsnorm(head, norm, s_.eps, s_.dim, head);
        rope(head, s_.rope + t.position * s_.rotary, s_.rotary);
      }
      const int32_t* pages = step_.pages + step_.rows[t.request] * step_.page_stride;
      const int64_t page = pages[t.position / s_.page_size];
      const int64_t slot = page * s_.page_size + t.position % s_.page_size;
      const bool last = t.position + 1 == step_.lengths[t.request];
      const bool fresh = last && t.position - slot % kKeys >= step_.cached[t.request];
      for (int h = 0; h < s_.kv_heads; ++h) {
        const float* key = row + q_size + h * s_.dim;
        store_kv(kv, slot, h, key, key + kv_size, fresh);
      }
    }
  });
}

KVLayer Model::kv_layer(const Layer& layer) const {
  const KVType type = KVType(s_.kv_type);
  return {type, s_.kv_heads, s_.dim, s_.page_size,
          holds_panels(type, Type(s_.compute), s_.dim, s_.page_size),
          layer.keys, layer.values, layer.key_scales, layer.value_scales};
}

template <class E>
void Model::attend(Team& team, const Layer& layer, Attention<E>& attention) {
  const int group = s_.q_heads / s_.kv_heads, width = s_.q_heads * s_.dim;
  const int64_t stride = width + 2 * s_.kv_heads * s_.dim;
  const KVLayer kv = kv_layer(layer);
  const bool aligned = s_.dim % kBlock == 0;
  using Sequence = typename Attention<E>::Sequence;
  Sequence room[2][kQueryRows];
  const auto describe = [&](const AttentionItem& item, Sequence* sequences) {
    for (int j = 0; j < item.requests; ++j) {
      const int64_t request = item.request + j, token = item.token + j;
      sequences[j] = {step_.pages + step_.rows[request] * step_.page_stride, tokens_[token].position,
                      item.requests == 1 ? item.tokens : 1, qkv_.data() + token * stride};
    }
    return typename Attention<E>::Item{sequences,  item.requests, item.shared, item.head,
                                       item.heads, layer.window,  stride,      s_.attention_scale};
  };
  team.share(int64_t(items_.size()), [&](int64_t i) {
    const AttentionItem& item = items_[i];
    const auto now = describe(item, room[0]);
    const auto next = describe(items_[std::min(i + 1, int64_t(items_.size()) - 1)], room[1]);
    attention.run(kv, now, &next);
    for (int r = 0; r < item.heads * item.tokens * group; ++r) {
      const float* head = attention.out() + r * attention.wide();
      const int kv_head = item.head + r / (item.tokens * group);
      const int64_t row = item.token + r / group % item.tokens;
      const int64_t at = int64_t(kv_head * group + r % group) * s_.dim;
      for (int d = 0; aligned && d < s_.dim; d += kBlock)
        put_block(context_, row, (at + d) / kBlock, head + d);
      if (!aligned) std::copy(head, head + s_.dim, attended_.data() + row * width + at);
    }
  });
  if (aligned) return;
  team.wait();  // a block of 32 has several heads
  team.split(num_tokens(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) put_row(context_, i, attended_.data() + i * width, width);
  });
}

void Model::project(Pool& pool, const int64_t* rows, int64_t count, float* logits, int64_t stride,
                    int64_t* best) {
  const Input last = last_forms_.make(count);
  const Linear& head = s_.head;
  best_.assign(pool.size(), std::vector<Best>(best ? count : 0, {-INFINITY, 0}));
  pool.run([&](Team& team) {
    team.split(count, [&](int64_t begin, int64_t end) {
      Buffer<float> row(s_.hidden);
      for (int64_t i = begin; i < end; ++i) {
        rmsnorm(x_.data() + rows[i] * s_.hidden, s_.final_norm, s_.eps, s_.hidden, row.data());
        put_row(last, i, row.data(), s_.hidden);
      }
    });
    team.wait();
    auto& mine = best_[team.id()];
    for_panels(team, head.panels(), count, [&](int panel, int64_t row, int m) {
      alignas(64) float c[kRows * kPanel];
      const Place at = multiply_panel(head, panel, last, row, m, c);
      for (int i = 0; i < m; ++i) {
        const float* from = c + i * kPanel;
        if (logits) std::copy(from, from + at.columns, logits + (row + i) * stride + at.first);
        if (!best) continue;
        Best& b = mine[row + i];
        for (int j = 0; j < at.columns; ++j) {
          const int64_t id = at.first + j;
          if (from[j] > b.value || (from[j] == b.value && id < b.id)) b = {from[j], id};
        }
      }
    });
  });
  for (int64_t i = 0; best && i < count; ++i) {
    Best b = best_[0][i];
    for (const auto& other : best_)
      if (other[i].value > b.value || (other[i].value == b.value && other[i].id < b.id)) b = other[i];
    best[i] = b.id;
  }
}

}  // namespace minisgl
