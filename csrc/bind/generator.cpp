#include "generate/generator.h"

#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "core/error.h"

namespace py = pybind11;

namespace surogate {

namespace {

/// Keeps the learner alive and takes its lock around all work: the two share weights and back-end.
struct GeneratorHandle {
    GeneratorHandle(std::shared_ptr<LearnerHandle> the_learner, const GeneratorOptions& options)
        : learner(std::move(the_learner)), generator(learner->learner, options) {}

    std::shared_ptr<LearnerHandle> learner;  // before the generator, which refers to it
    Generator generator;

    template <typename Body>
    auto locked(Body&& body) {
        py::gil_scoped_release release;
        const std::lock_guard lock(learner->mutex);
        return body(generator);
    }
};

GeneratorOptions make_options(std::int64_t max_sequences, std::int64_t cache_tokens, std::int64_t block_size, std::int64_t valid_vocab,
                              std::int64_t prefill_chunk) {
    GeneratorOptions options;
    options.max_sequences = max_sequences;
    options.cache_tokens = cache_tokens;
    options.block_size = block_size;
    options.valid_vocab = valid_vocab;
    options.prefill_chunk = prefill_chunk;
    return options;
}

py::object finish_name(Finish finish) {
    switch (finish) {
        case Finish::Stop:
            return py::str("stop");
        case Finish::Length:
            return py::str("length");
        case Finish::Aborted:
            return py::str("aborted");
        case Finish::None:
            break;
    }
    return py::none();
}

}  // namespace

void bind_generator(py::module_& module) {
    const GeneratorOptions defaults;
    py::class_<GeneratorHandle>(
        module, "Generator",
        "Continuous batching over a learner's weights. A sample depends on its request's seed, prompt and parameters alone.")
        .def(py::init([](const std::shared_ptr<LearnerHandle>& learner, std::int64_t max_sequences, std::int64_t cache_tokens,
                         std::int64_t block_size, std::int64_t valid_vocab, std::int64_t prefill_chunk) {
                 const GeneratorOptions options = make_options(max_sequences, cache_tokens, block_size, valid_vocab, prefill_chunk);
                 py::gil_scoped_release release;
                 const std::lock_guard lock(learner->mutex);
                 return std::make_unique<GeneratorHandle>(learner, options);
             }),
             py::arg("learner").none(false), py::kw_only(), py::arg("max_sequences") = defaults.max_sequences,
             py::arg("cache_tokens") = defaults.cache_tokens, py::arg("block_size") = defaults.block_size,
             py::arg("valid_vocab") = defaults.valid_vocab, py::arg("prefill_chunk") = defaults.prefill_chunk)
        .def_static(
            "plan",
            [](const ModelSpec& spec, std::int64_t max_sequences, std::int64_t cache_tokens, std::int64_t block_size,
               std::int64_t valid_vocab, std::int64_t prefill_chunk, std::int64_t lora_rank) {
                LoraOptions lora;
                lora.rank = lora_rank;
                return memory_list(
                    Generator::plan(spec, make_options(max_sequences, cache_tokens, block_size, valid_vocab, prefill_chunk), lora));
            },
            py::arg("spec"), py::kw_only(), py::arg("max_sequences") = defaults.max_sequences,
            py::arg("cache_tokens") = defaults.cache_tokens, py::arg("block_size") = defaults.block_size,
            py::arg("valid_vocab") = defaults.valid_vocab, py::arg("prefill_chunk") = defaults.prefill_chunk, py::arg("lora_rank") = 0)
        .def(
            "add",
            [](GeneratorHandle& handle, std::uint64_t id, const py::object& prompt, std::int32_t max_new_tokens, double temperature,
               double top_p, std::int32_t top_k, double min_p, std::uint64_t seed, std::vector<std::int32_t> stop_ids) {
                const Int32Array tokens = int32_vector("Generator.add", "prompt", prompt);
                GenerateRequest request;
                request.id = id;
                request.prompt.assign(tokens.data(), tokens.data() + tokens.size());
                request.params.temperature = static_cast<float>(temperature);
                request.params.top_p = static_cast<float>(top_p);
                request.params.top_k = top_k;
                request.params.min_p = static_cast<float>(min_p);
                request.params.seed = seed;
                request.params.max_new_tokens = max_new_tokens;
                request.params.stop_ids = std::move(stop_ids);
                handle.locked([&](Generator& generator) { generator.add(std::move(request)); });
            },
            py::arg("id"), py::arg("prompt"), py::kw_only(), py::arg("max_new_tokens"), py::arg("temperature") = 1.0,
            py::arg("top_p") = 1.0, py::arg("top_k") = 0, py::arg("min_p") = 0.0, py::arg("seed") = 0,
            py::arg("stop_ids") = std::vector<std::int32_t>{})
        .def(
            "abort",
            [](GeneratorHandle& handle, std::uint64_t id) {
                return handle.locked([&](Generator& generator) { return generator.abort(id); });
            },
            py::arg("id"))
        .def("step",
             [](GeneratorHandle& handle) {
                 const std::vector<TokenEvent> events = handle.locked([](Generator& generator) { return generator.step(); });
                 py::list result;
                 for (const TokenEvent& event : events) {
                     result.append(py::make_tuple(event.id, event.token, event.logp, finish_name(event.finish)));
                 }
                 return result;
             })
        .def("unfinished",
             [](GeneratorHandle& handle) { return handle.locked([](Generator& generator) { return generator.unfinished(); }); })
        .def("weights_changed", [](GeneratorHandle& handle) { handle.locked([](Generator& generator) { generator.weights_changed(); }); })
        .def_property_readonly(
            "preemptions",
            [](GeneratorHandle& handle) { return handle.locked([](Generator& generator) { return generator.preemptions(); }); })
        .def_property_readonly("cache_tokens", [](GeneratorHandle& handle) { return handle.generator.options().cache_tokens; })
        .def("memory", [](GeneratorHandle& handle) { return memory_list(handle.generator.memory()); });
}

}  // namespace surogate
