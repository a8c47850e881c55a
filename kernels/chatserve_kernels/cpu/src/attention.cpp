#include "attention.h"

#include <functional>

#include "attention_task.h"

namespace cs {

namespace {

constexpr int64_t kMaxTaskRows = 96;   // query rows of one task: they share the work of laying out keys and values
constexpr int64_t kStep = 64;          // tokens of past: tasks end at multiples of it from their piece's beginning
constexpr int64_t kLayoutRows = 4;     // laying out keys and values costs about as much as this many rows
constexpr int64_t kTaskCost = 672;     // beginning a task costs as much as three heads of a row's 32 tokens (measured)
constexpr int64_t kTasksPerThread = 6;  // that cutting may add
constexpr int64_t kNever = INT64_MAX;
constexpr int64_t kHeadRows = 24;      // rows up to which a task takes several heads: a block holds them side by side
constexpr int kMergesPerTask = 16;

int g_share_threshold = 48;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Query tokens and the range of the past they attend to, for every key/value head.
struct Piece {
  const int64_t* table;
  int64_t first, count, begin, end;
  bool whole;  // nothing else of these tokens' past is attended to elsewhere
};

class Planner {
 public:
  Planner(const Paged& paged, int64_t group, int64_t window, bool fixed)
      : paged_(paged), group_(group), window_(window), fixed_(fixed), shared_until_(size_t(paged.num_sequences), 0) {}

  AttentionPlan plan(int threads) {
    plan_.fixed = fixed_;
    place_tokens();
    if (window_ == 0 && !fixed_)
      for (int64_t run = 0; run < paged_.num_runs; ++run) add_run(run);
    for (int64_t s = 0; s < paged_.num_sequences; ++s) add_sequence(s);
    make_tasks(threads);
    make_merges();
    return std::move(plan_);
  }

 private:
  int64_t query_len(int64_t s) const { return paged_.query_start[s + 1] - paged_.query_start[s]; }
  int64_t past(int64_t s) const { return paged_.seq_lens[s] - query_len(s); }

  void place_tokens() {
    for (int64_t s = 0; s < paged_.num_sequences; ++s)
      for (int64_t i = 0; i < query_len(s); ++i) {
        plan_.order.push_back(int64_t(plan_.order.size()));
        plan_.position.push_back(past(s) + i);
      }
  }

  void add_pieces(const int64_t* table, int64_t first, int64_t count, int64_t begin, int64_t end, bool whole) {
    const int64_t tokens = std::max<int64_t>(1, kMaxTaskRows / group_);
    for (int64_t at = 0; at < count; at += tokens)
      pieces_.push_back({table, first + at, std::min(tokens, count - at), begin, end, whole});
  }

  // Runs are a hint: one whose members do not continue one and the same earlier run is left alone.
  void add_run(int64_t run) {
    const int32_t* members = paged_.run_members + paged_.run_start[run];
    const int64_t count = paged_.run_start[run + 1] - paged_.run_start[run];
    const int64_t end = paged_.run_blocks[run] * paged_.block_size;
    if (count < 2) return;
    const int64_t begin = shared_until_[size_t(members[0])];
    if ((end - begin) * (count - 1) < g_share_threshold * count) return;
    for (int64_t i = 0; i < count; ++i)
      if (shared_until_[size_t(members[i])] != begin || past(members[i]) < end) return;
    const int64_t first = int64_t(plan_.order.size());
    for (int64_t i = 0; i < count; ++i) {
      shared_until_[size_t(members[i])] = end;
      for (int64_t t = paged_.query_start[members[i]]; t < paged_.query_start[members[i] + 1]; ++t)
        plan_.order.push_back(t);
    }
    add_pieces(paged_.table(members[0]), first, int64_t(plan_.order.size()) - first, begin, end, false);
  }

  void add_sequence(int64_t s) {
    const int64_t tokens = std::max<int64_t>(1, kMaxTaskRows / group_), shared = shared_until_[size_t(s)];
    for (int64_t first = 0; first < query_len(s); first += tokens) {
      const int64_t count = std::min(tokens, query_len(s) - first);
      const int64_t seen = window_ > 0 ? std::max<int64_t>(0, past(s) + first - window_ + 1) / kStep * kStep : 0;
      add_pieces(paged_.table(s), paged_.query_start[s] + first, count, std::max(shared, seen), past(s) + first + count,
                 shared == 0);
    }
  }

  // How pieces become tasks: of so many tokens of the past, with several heads or with one.
  struct Cut {
    int64_t step;
    bool apart;
  };

  int64_t together(const Piece& piece, bool apart) const {
    return apart ? 1 : std::clamp<int64_t>(kHeadRows / (piece.count * group_), 1, paged_.kv_heads);
  }

  // body(piece, head, heads, begin, end) for every task of a cut.
  template <class F>
  void for_tasks(const Cut& cut, const F& body) const {
    for (const Piece& piece : pieces_) {
      const int64_t heads = together(piece, cut.apart);
      for (int64_t head = 0; head < paged_.kv_heads; head += heads)
        for (int64_t from = piece.begin; from < piece.end; from += cut.step)
          body(piece, head, std::min(heads, paged_.kv_heads - head), from, std::min(piece.end, from + cut.step));
    }
  }

  // When the last thread is done if they take a cut's tasks longest first; never if those are more than `most`.
  int64_t makespan(const Cut& cut, int threads, size_t most) const {
    std::vector<int64_t> costs, busy(size_t(threads), 0);
    for_tasks(cut, [&](const Piece& piece, int64_t, int64_t heads, int64_t begin, int64_t end) {
      costs.push_back((piece.count * group_ + kLayoutRows) * (end - begin) * heads + kTaskCost);
    });
    if (costs.size() > most) return kNever;
    std::sort(costs.begin(), costs.end(), std::greater<>());
    for (int64_t cost : costs) {  // a heap whose first is done first
      std::pop_heap(busy.begin(), busy.end(), std::greater<>());
      busy.back() += cost;
      std::push_heap(busy.begin(), busy.end(), std::greater<>());
    }
    return *std::max_element(busy.begin(), busy.end());
  }

  // The cut that is done first: few tasks leave threads idle, many cost their beginnings.
  Cut best_cut(int threads) const {
    int64_t longest = kStep, total = 0;
    size_t most = size_t(kTasksPerThread * threads);
    for (const Piece& piece : pieces_) {
      most += size_t((paged_.kv_heads + together(piece, false) - 1) / together(piece, false));
      longest = std::max(longest, round_up(piece.end - piece.begin, kStep));
      total += (piece.count * group_ + kLayoutRows) * (piece.end - piece.begin) * paged_.kv_heads;
    }
    Cut best{longest, false};
    if (threads == 1 || fixed_) return best;
    const int64_t enough = total / threads * 17 / 16;
    int64_t soonest = makespan(best, threads, most);
    for (const bool apart : {false, true})
      for (int64_t parts = 1; soonest > enough; parts += std::max<int64_t>(1, parts / 3)) {
        const Cut cut{round_up((longest + parts - 1) / parts, kStep), apart};
        const int64_t done = makespan(cut, threads, most);
        if (done < soonest) soonest = done, best = cut;
        if (done == kNever || cut.step == kStep) break;
      }
    return best;
  }

  void make_tasks(int threads) {
    for_tasks(best_cut(threads), [&](const Piece& piece, int64_t head, int64_t heads, int64_t begin, int64_t end) {
      const bool partial = !piece.whole || begin > piece.begin || end < piece.end;
      plan_.tasks.push_back(
          {piece.table, head, heads, piece.first, piece.count, begin, end, partial ? plan_.num_records : -1});
      if (partial) plan_.num_records += heads * piece.count * group_;
    });
  }

  void make_merges() {
    if (plan_.num_records > 0) {
      const size_t heads = size_t(paged_.kv_heads), slots = plan_.position.size() * heads;
      auto start = std::vector<int64_t>(slots + 1, 0);
      const auto each = [&](const auto& body) {
        for (const Task& task : plan_.tasks)
          for (int64_t i = 0; task.record >= 0 && i < task.heads * task.count; ++i)
            body(size_t(plan_.order[size_t(task.first + i % task.count)]) * heads + size_t(task.head + i / task.count),
                 task.record + i * group_);
      };
      each([&](size_t slot, int64_t) { ++start[slot + 1]; });
      for (size_t slot = 0; slot < slots; ++slot) start[slot + 1] += start[slot];
      plan_.parts.resize(size_t(start[slots]));
      std::vector<int64_t> next(start.begin(), start.end() - 1);
      each([&](size_t slot, int64_t record) { plan_.parts[size_t(next[slot]++)] = record; });
      for (size_t slot = 0; slot < slots; ++slot) {
        if (start[slot] == start[slot + 1]) continue;
        plan_.merge_token.push_back(int64_t(slot / heads));
        plan_.merge_head.push_back(int64_t(slot % heads));
        plan_.merge_start.push_back(start[slot]);
      }
      plan_.merge_start.push_back(start[slots]);
    }
    // Longest first: a long prompt's last chunk must not start when everybody else is done.
    std::stable_sort(plan_.tasks.begin(), plan_.tasks.end(), [](const Task& a, const Task& b) {
      return (a.end - a.begin) * a.count * a.heads > (b.end - b.begin) * b.count * b.heads;
    });
  }

  const Paged& paged_;
  const int64_t group_, window_;
  const bool fixed_;
  std::vector<int64_t> shared_until_;  // by sequence: positions before this one are dealt with
  std::vector<Piece> pieces_;
  AttentionPlan plan_;
};

void merge(const Call& call, size_t index) {
  const AttentionPlan& plan = call.plan;
  const int64_t dim = call.paged.head_dim;
  const int64_t* parts = plan.parts.data() + plan.merge_start[index];
  const int64_t count = plan.merge_start[index + 1] - plan.merge_start[index];
  for (int64_t row = 0; row < call.group(); ++row) {
    float highest = kHidden;
    for (int64_t i = 0; i < count; ++i) {
      const float maximum = call.record(parts[i] + row)[dim];
      if (!(maximum <= highest)) highest = maximum;  // a NaN becomes the maximum and stays
    }
    float total = 0.0f;
    float* out = call.out_of(plan.merge_token[index], plan.merge_head[index], row);
    std::fill(out, out + dim, 0.0f);
    for (int64_t i = 0; i < count; ++i) {
      const float* part = call.record(parts[i] + row);
      const float weight = std::exp2(part[dim] - highest);
      total += weight * part[dim + 1];
      for (int64_t d = 0; d < dim; ++d) out[d] += weight * part[d];
    }
    const float inverse = 1.0f / total;
    for (int64_t d = 0; d < dim; ++d) out[d] *= inverse;
  }
}

}  // namespace

int share_threshold() { return g_share_threshold; }
void set_share_threshold(int tokens) { g_share_threshold = tokens; }

AttentionPlan plan_attention(const Paged& paged, int64_t num_heads, int64_t window, int threads, bool fixed) {
  return Planner(paged, num_heads / paged.kv_heads, window, fixed).plan(threads);
}

void attend(ThreadPool& pool, const Paged& paged, const AttentionPlan& plan, int64_t layer, int64_t num_heads,
            const float* query, int64_t query_stride, float scale, int64_t window, bool amx, Buffer<float>& records,
            float* out, int64_t out_stride) {
  Call call{paged, plan, layer, num_heads, query, query_stride, scale, window, nullptr, out, out_stride};
  call.records = records.reserve(size_t(plan.num_records * call.record_stride()));
  const bool tiles = amx && can_attend_tiles(paged), vectors = can_attend_vectors(paged);
  pool.run(int(plan.tasks.size()), [&](int i) {
    const Task& task = plan.tasks[size_t(i)];
    if (tiles) return attend_tiles(call, task);
    if (vectors) return attend_vectors(call, task);
    for (int64_t head = 0; head < task.heads; ++head) attend_portable(call, call.one_head(task, head));
  });
  const int merges = int(plan.merge_token.size());
  pool.run((merges + kMergesPerTask - 1) / kMergesPerTask, [&](int i) {
    for (int at = i * kMergesPerTask; at < std::min(merges, (i + 1) * kMergesPerTask); ++at) merge(call, size_t(at));
  });
}

}  // namespace cs
