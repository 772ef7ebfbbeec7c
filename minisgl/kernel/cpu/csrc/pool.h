// Threads that run one function together, with barriers and shared work inside it.
//
//   pool.run([&](Team& team) {           every thread runs this
//     team.share(items, [&](int i) {});  each item once, by whichever thread is free
//     team.wait();                       until all are here
//   });
//
// Waiting spins for a short time, because a step has a few hundred barriers a millisecond or less
// apart, then sleeps in the kernel.
//
// When another process takes one of the CPUs, the thread there stands still for milliseconds and
// all others wait for it at every barrier: two threads are then slower than one. So the pool measures
// how long its threads wanted a CPU and had none, leaves one out when that goes on, and tries again
// later. Results never depend on the number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <time.h>

namespace minisgl {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The time that this thread slept because it had nothing to do.
inline thread_local double asleep_s = 0;

// Wait until the value is another than `old`, which it became at `changed`; `spins` pauses first,
// then asleep. Waking up late is not sleep: it is wanting a CPU.
inline void await_change(std::atomic<uint32_t>& value, uint32_t old, int spins,
                         const std::atomic<double>& changed) {
  for (int i = 0; i < spins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  const double start = seconds();
  value.wait(old, std::memory_order_acquire);
  asleep_s += std::max(0.0, changed.load(std::memory_order_relaxed) - start);
}

// A stretch of a thread's work: how long it stood still without having been asleep.
class Stretch {
 public:
  double lost_s() const { return seconds() - start_ - (used() - used_) - (asleep_s - asleep_); }

 private:
  static double used() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
  }

  double start_ = seconds(), used_ = used(), asleep_ = asleep_s;
};

// How many threads to use, by what one of them loses.
class Crowding {
 public:
  explicit Crowding(int threads) : most_(threads), now_(threads) {}

  int threads() const { return now_; }

  // A run ended now, in which the thread that stood still longest did so for `lost_s`.
  void ran(double lost_s) {
    const double time = seconds();
    // A process that wants a CPU for itself takes a third of one or more; what a quiet system does
    // now and then drains away.
    score_ = std::max(0.0, score_ + lost_s - kCalmShare * (time - last_));
    last_ = time;
    if (now_ > 1 && score_ > kCrowded) {
      --now_;
      score_ = 0;
      until_ = time + patience_;
      patience_ = std::min(2 * patience_, kMostPatience);
    } else if (now_ < most_ && time > until_) {
      ++now_;
      score_ = 0;
      until_ = time + kTrial;
    } else if (now_ == most_ && time > until_) {
      patience_ = kLeastPatience;  // the trial went well
    }
  }

 private:
  static constexpr double kCalmShare = 0.15, kCrowded = 0.008;  // of the time; seconds
  static constexpr double kLeastPatience = 0.3, kMostPatience = 4.8, kTrial = 0.3;  // seconds

  const int most_;
  int now_;
  double score_ = 0, last_ = seconds(), until_ = 0, patience_ = kLeastPatience;
};

class Pool;

class Team {
 public:
  Team(Pool& pool, int id, int size) : pool_(pool), id_(id), size_(size) {}

  int id() const { return id_; }
  int size() const { return size_; }

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
    const int64_t begin = count * id_ / size_, end = count * (id_ + 1) / size_;
    if (begin < end) f(begin, end);
  }

 private:
  Pool& pool_;
  const int id_, size_;
};

class Pool {
 public:
  explicit Pool(int threads) : ranges_(threads), crowding_(threads) {
    for (int id = 1; id < threads; ++id) workers_.emplace_back([this, id] { work(id); });
  }

  ~Pool() {
    job_ = nullptr;
    start(size());
    for (auto& worker : workers_) worker.join();
  }

  Pool(const Pool&) = delete;

  int size() const { return int(ranges_.size()); }

  // Run the job on all threads, or as many as others leave, the caller's included; return when all
  // are done.
  void run(const std::function<void(Team&)>& job) {
    const int threads = crowding_.threads();
    Team team(*this, 0, threads);
    lost_us_.store(0, std::memory_order_relaxed);
    const Stretch stretch;
    job_ = &job;
    if (threads > 1) start(threads);
    job(team);
    team.wait();
    const double others = 1e-6 * double(lost_us_.load(std::memory_order_relaxed));
    crowding_.ran(std::max(stretch.lost_s(), others));
  }

 private:
  friend class Team;

  // Between two steps Python has some hundred microseconds of work; between two barriers less.
  static constexpr uint32_t kMostThreads = 2048;
  static constexpr int kStepSpins = 20000, kBarrierSpins = 4000;

  struct alignas(64) Range {
    std::atomic<uint64_t> next_end{0};  // the next item, and past the last, in 32 bits each
  };

  // The run's number and its threads in one word, so that no thread sees one without the other.
  void start(int threads) {
    started_s_.store(seconds(), std::memory_order_relaxed);
    epoch_.store((epoch_.load(std::memory_order_relaxed) / kMostThreads + 1) * kMostThreads + threads);
    epoch_.notify_all();
  }

  void arrive(int threads) {
    const uint32_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(threads)) {
      arrived_.store(0, std::memory_order_relaxed);
      turned_s_.store(seconds(), std::memory_order_relaxed);
      turn_.store(turn + 1);  // in one order with the sleepers' count that notify reads
      turn_.notify_all();
    } else {
      await_change(turn_, turn, kBarrierSpins, turned_s_);
    }
  }

  void work(int id) {
    int spins = kStepSpins;
    for (uint32_t epoch = 0;;) {
      await_change(epoch_, epoch, spins, started_s_);
      epoch = epoch_.load(std::memory_order_acquire);
      const int threads = int(epoch % kMostThreads);
      spins = id < threads ? kStepSpins : 0;  // one that is left out leaves its CPU too
      if (id >= threads) continue;
      if (!job_) return;
      Team team(*this, id, threads);
      const double late_s = seconds() - started_s_.load(std::memory_order_relaxed);
      const Stretch stretch;
      (*job_)(team);
      const long lost = long(1e6 * (late_s + stretch.lost_s()));
      long most = lost_us_.load(std::memory_order_relaxed);
      while (lost > most && !lost_us_.compare_exchange_weak(most, lost)) {
      }
      team.wait();
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
  Crowding crowding_;
  std::atomic<long> lost_us_{0};  // of the worker that stood still longest
  std::atomic<double> started_s_{0}, turned_s_{0};  // when epoch_ and turn_ changed
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
};

inline void Team::wait() {
  if (size_ > 1) pool_.arrive(size_);
}

template <class F>
void Team::share(int64_t count, F&& f) {
  const int n = size_;
  const uint64_t begin = count * id_ / n, end = count * (id_ + 1) / n;
  pool_.ranges_[id_].next_end.store(begin | end << 32, std::memory_order_release);
  // A thread that has not begun yet has an empty range: it does its part itself.
  for (int i = 0; i < n; ++i)
    for (int64_t item; (item = pool_.take((id_ + i) % n)) >= 0;) f(item);
}

}  // namespace minisgl
