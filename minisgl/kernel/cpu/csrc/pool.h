// Threads that run one function together, with barriers and shared work inside it.
//
//   pool.run([&](Team& team) {           every thread runs this
//     team.share(items, [&](int i) {});  each item once, by whichever thread is free
//     team.wait();                       until all are here
//   });
//
// Waiting spins for a short time, because a step has a few hundred barriers a millisecond or less
// apart, then sleeps in the kernel: a thread that spins on takes the CPU from one that computes
// when another process wants it too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace minisgl {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Wait until the value is another than `old`; `spins` pauses first, then asleep.
inline void await_change(std::atomic<uint32_t>& value, uint32_t old, int spins) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
}

class Pool;

class Team {
 public:
  Team(Pool& pool, int id) : pool_(pool), id_(id) {}

  int id() const { return id_; }
  int size() const;

  // Until every thread has come here.
  void wait();

  // Call f(i) for every i in [0, count), each once over all threads. Each thread begins with a
  // part of its own and then helps the others. All threads must make the same calls, with a
  // `wait` between one `share` and the next.
  template <class F>
  void share(int64_t count, F&& f);

  // The same for pieces of a fixed cost, such as copying: f(begin, end), once for each thread.
  template <class F>
  void split(int64_t count, F&& f) {
    const int64_t begin = count * id_ / size(), end = count * (id_ + 1) / size();
    if (begin < end) f(begin, end);
  }

 private:
  Pool& pool_;
  const int id_;
};

class Pool {
 public:
  explicit Pool(int threads) : ranges_(threads) {
    for (int id = 1; id < threads; ++id) workers_.emplace_back([this, id] { work(id); });
  }

  ~Pool() {
    job_ = nullptr;
    start();
    for (auto& worker : workers_) worker.join();
  }

  Pool(const Pool&) = delete;

  int size() const { return int(ranges_.size()); }

  // Run the job on all threads, the caller's included, and return when all are done.
  void run(const std::function<void(Team&)>& job) {
    Team team(*this, 0);
    job_ = &job;
    start();
    job(team);
    arrive();
  }

 private:
  friend class Team;

  // Between two steps Python has some hundred microseconds of work; between two barriers less.
  static constexpr int kStepSpins = 20000, kBarrierSpins = 4000;

  struct alignas(64) Range {
    std::atomic<uint64_t> next_end{0};  // the next item, and past the last, in 32 bits each
  };

  void start() {
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
  }

  void arrive() {
    const uint32_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(size())) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      turn_.notify_all();
    } else {
      await_change(turn_, turn, kBarrierSpins);
    }
  }

  void work(int id) {
    Team team(*this, id);
    for (uint32_t epoch = 0;; ++epoch) {
      await_change(epoch_, epoch, kStepSpins);
      if (!job_) return;
      (*job_)(team);
      arrive();
    }
  }

  // Take an item of a thread's range, -1 when there is none left.
  int64_t take(int owner) {
    auto& range = ranges_[owner].next_end;
    uint64_t now = range.load(std::memory_order_relaxed);
    while (uint32_t(now) < uint32_t(now >> 32)) {
      if (range.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return uint32_t(now);
    }
    return -1;
  }

  std::vector<Range> ranges_;
  std::vector<std::thread> workers_;
  const std::function<void(Team&)>* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
};

inline int Team::size() const { return pool_.size(); }

inline void Team::wait() {
  if (size() > 1) pool_.arrive();
}

template <class F>
void Team::share(int64_t count, F&& f) {
  const int n = size();
  const uint64_t begin = count * id_ / n, end = count * (id_ + 1) / n;
  pool_.ranges_[id_].next_end.store(begin | end << 32, std::memory_order_release);
  // A thread that has not begun yet has an empty range: it does its part itself.
  for (int i = 0; i < n; ++i)
    for (int64_t item; (item = pool_.take((id_ + i) % n)) >= 0;) f(item);
}

}  // namespace minisgl
