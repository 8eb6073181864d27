#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "core/random.h"
#include "core/thread_pool.h"
#include "tests/harness.h"

using namespace surogate;

TEST(pool_calls_each_index_once) {
    for (const int threads : {1, 2, 3, 8}) {
        ThreadPool pool(threads);
        CHECK_EQ(pool.size(), threads);
        for (const std::int64_t count : {0, 1, 2, 7, 1000}) {
            std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
            std::atomic<bool> known_worker{true};
            pool.parallel_for(count, [&](std::int64_t index, int worker) {
                ++calls[static_cast<std::size_t>(index)];
                if (worker < 0 || worker >= threads) known_worker = false;
            });
            CHECK(known_worker);
            for (const auto& times : calls) CHECK_EQ(times.load(), 1);
        }
    }
}

TEST(pool_uses_all_cores_by_default) {
    ThreadPool pool;
    CHECK(pool.size() >= 1);
    CHECK_THROWS(ThreadPool(-1), "ThreadPool: threads");
}

TEST(pool_survives_many_short_loops_and_sleep) {
    ThreadPool pool(3);
    std::atomic<std::int64_t> sum{0};
    for (int round = 0; round < 20000; ++round) {
        pool.parallel_for(4, [&](std::int64_t index) { sum += index; });
        if (round % 5000 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    CHECK_EQ(sum.load(), std::int64_t{20000 * 6});
}

TEST(pool_runs_on_other_threads) {
    // Both indices wait for each other: only two threads at once can end this.
    ThreadPool pool(2);
    std::atomic<int> arrived{0};
    pool.parallel_for(2, [&](std::int64_t) {
        ++arrived;
        while (arrived.load() < 2) std::this_thread::yield();
    });
    CHECK_EQ(arrived.load(), 2);
}

TEST(pool_ranges) {
    ThreadPool pool(2);
    std::vector<std::atomic<int>> calls(103);
    std::atomic<int> ranges{0};
    pool.parallel_ranges(103, 10, [&](std::int64_t begin, std::int64_t end) {
        ++ranges;
        for (std::int64_t i = begin; i < end; ++i) ++calls[static_cast<std::size_t>(i)];
    });
    CHECK_EQ(ranges.load(), 11);
    for (const auto& times : calls) CHECK_EQ(times.load(), 1);
}

TEST(pool_hands_on_exceptions) {
    ThreadPool pool(3);
    for (int round = 0; round < 200; ++round) {
        std::atomic<int> calls{0};
        const auto loop = [&] {
            pool.parallel_for(1000, [&](std::int64_t index) {
                ++calls;
                if (index == round) throw std::runtime_error("index " + std::to_string(index));
            });
        };
        CHECK_THROWS(loop(), "index " + std::to_string(round));
        CHECK(calls.load() <= 1000);
    }
    // From a thread that is not the caller.
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<int> arrived{0};
    const auto loop = [&] {
        pool.parallel_for(2, [&](std::int64_t) {
            ++arrived;
            while (arrived.load() < 2) std::this_thread::yield();
            if (std::this_thread::get_id() != caller) throw std::runtime_error("from a worker");
        });
    };
    CHECK_THROWS(loop(), "from a worker");
    std::atomic<int> after{0};
    pool.parallel_for(10, [&](std::int64_t) { ++after; });
    CHECK_EQ(after.load(), 10);
}

TEST(pool_refuses_a_loop_within_a_loop) {
    ThreadPool pool(2);
    CHECK_THROWS(pool.parallel_for(2, [&](std::int64_t) { pool.parallel_for(2, [](std::int64_t) {}); }), "may not start another one");
}

TEST(pool_serves_several_callers) {
    ThreadPool pool(2);
    std::atomic<std::int64_t> sum{0};
    const auto call = [&] {
        for (int round = 0; round < 2000; ++round) pool.parallel_for(3, [&](std::int64_t index) { sum += index; });
    };
    std::thread other(call);
    call();
    other.join();
    CHECK_EQ(sum.load(), std::int64_t{2 * 2000 * 3});
}

TEST(pool_in_a_forked_process_says_so) {
    ThreadPool pool(2);
    const pid_t child = ::fork();
    if (child == 0) {
        int status = 1;
        try {
            pool.parallel_for(2, [](std::int64_t) {});
        } catch (const std::runtime_error&) {
            status = 0;
        }
        ::_exit(status);
    }
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(philox_known_answers) {
    // From the test vectors of Random123, kat_vectors, philox4x32 with 10 rounds.
    const Philox::Block zeros = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
    CHECK((Philox(0, 0)(0) == zeros));
    const Philox::Block ones = {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu};
    CHECK((Philox(~std::uint64_t{0}, ~std::uint64_t{0})(~std::uint64_t{0}) == ones));
    const Philox::Block pi = {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u};
    CHECK((Philox(0x299f31d0a4093822u, 0x0370734413198a2eu)(0x85a308d3243f6a88u) == pi));
}

TEST(philox_distributions) {
    const Philox draw(42, 1);
    const int n = 200000;
    double sum = 0.0, squares = 0.0, uniform = 0.0, fourth = 0.0;
    for (int i = 0; i < n; ++i) {
        const double x = draw.normal(static_cast<std::uint64_t>(i)), u = draw.uniform(static_cast<std::uint64_t>(i));
        CHECK(u > 0.0 && u < 1.0);
        sum += x;
        squares += x * x;
        fourth += x * x * x * x;
        uniform += u;
    }
    CHECK_NEAR(sum / n, 0.0, 0.01);
    CHECK_NEAR(squares / n, 1.0, 0.015);
    CHECK_NEAR(fourth / n, 3.0, 0.1);
    CHECK_NEAR(uniform / n, 0.5, 0.003);
}
