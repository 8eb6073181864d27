#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/memory.h"

namespace surogate {

/// Threads that share out the indices of a loop. The caller takes part, and a thread that is not scheduled in time is not waited for, so
/// that a pool on a busy machine is never slower than the caller alone. Idle threads spin shortly, then yield, then sleep.
class ThreadPool {
   public:
    /// `threads` includes the caller; 0: one per core that this process may run on.
    explicit ThreadPool(int threads = 0);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return size_; }

    /// Calls body(index) or body(index, worker) once for each index in [0, count), in any order; worker in [0, size()). The first exception
    /// that a body throws is thrown again here, and indices not yet begun are left out. A body may not start another loop on the same pool.
    template <typename Body>
    void parallel_for(std::int64_t count, Body&& body) {
        using Callable = std::remove_reference_t<Body>;
        run(count, {const_cast<void*>(static_cast<const void*>(std::addressof(body))), [](void* callable, std::int64_t index, int worker) {
                        if constexpr (std::is_invocable_v<Callable&, std::int64_t, int>) {
                            (*static_cast<Callable*>(callable))(index, worker);
                        } else {
                            (void)worker;
                            (*static_cast<Callable*>(callable))(index);
                        }
                    }});
    }

    /// The same over [0, count) in ranges body(begin, end) of `grain` indices (the last may be shorter). The ranges depend on count and
    /// grain alone, so that sums taken over a range have the same bits whatever the number of threads.
    template <typename Body>
    void parallel_ranges(std::int64_t count, std::int64_t grain, Body&& body) {
        const std::int64_t ranges = (count + grain - 1) / grain;
        parallel_for(ranges, [&](std::int64_t range) {
            const std::int64_t begin = range * grain;
            body(begin, begin + grain < count ? begin + grain : count);
        });
    }

    /// Once round in a loop that waits for another thread of the pool.
    static void pause();

    /// Memory of one worker that lives as long as the pool: what it held is lost when it is asked for again.
    float* scratch(int worker, std::size_t floats) { return scratch_[static_cast<std::size_t>(worker)].floats(floats); }

   private:
    struct Job {
        void* callable = nullptr;
        void (*invoke)(void*, std::int64_t, int) = nullptr;
    };

    void run(std::int64_t count, const Job& job);
    void take_indices(int worker);
    void serve(int worker);
    void shut_down();

    int size_ = 1;
    int process_ = 0;  // a forked child has the pool's memory but not its threads
    std::mutex caller_;
    std::vector<std::thread> threads_;
    std::vector<AlignedBuffer> scratch_;

    Job job_;
    std::int64_t count_ = 0;
    std::exception_ptr error_;
    std::atomic_flag failed_;
    alignas(64) std::atomic<std::int64_t> next_{0};
    // Epoch of the job in the upper bits, whether it may still be joined, and how many threads are inside it.
    alignas(64) std::atomic<std::uint64_t> state_{0};
    alignas(64) std::atomic<std::uint32_t> wake_{0};
    std::atomic<bool> stop_{false};
};

}  // namespace surogate
