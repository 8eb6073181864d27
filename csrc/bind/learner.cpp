#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "core/error.h"
#include "model/layout.h"

namespace py = pybind11;

namespace surogate {

namespace {

using Handle = LearnerHandle;

/// Runs `body` on the learner with the GIL released and the learner's lock held, in this order; neither is held when it returns.
template <typename Body>
auto locked(Handle& handle, Body&& body) {
    py::gil_scoped_release release;
    const std::lock_guard lock(handle.mutex);
    return body(handle.learner);
}

ModelSpec make_spec(const py::kwargs& fields) {
    ModelSpec spec;
    py::object object = py::cast(&spec, py::return_value_policy::reference);
    for (const auto& [name, value] : fields) {
        if (!py::hasattr(object, name) || !py::isinstance<py::str>(name) || py::hasattr(py::type::of(object).attr(name), "__call__")) {
            throw py::type_error("ModelSpec: there is no field '" + std::string(py::str(name)) + "'");
        }
        try {
            py::setattr(object, name, value);
        } catch (const py::error_already_set&) {
            throw py::type_error("ModelSpec: " + std::string(py::str(name)) + ": expected the field's type, got " +
                                 describe(py::reinterpret_borrow<py::object>(value)));
        }
    }
    return spec;
}

/// "cpu", "cuda" or "cuda:N"
std::shared_ptr<Backend> make_backend(const std::string& device, int threads, bool deterministic, bool profile = false) {
    require(threads >= 0, "Learner", "threads", "a positive number, or 0 for one per core", threads);
    if (device == "cpu") return make_cpu_backend({threads});
    const std::string prefix = "cuda:";
    CudaOptions options;
    options.deterministic = deterministic;
    options.profile = profile;
    if (device.starts_with(prefix) && device.size() > prefix.size() && device.size() < prefix.size() + 4 &&
        std::all_of(device.begin() + static_cast<std::ptrdiff_t>(prefix.size()), device.end(),
                    [](char c) { return c >= '0' && c <= '9'; })) {
        options.device = std::stoi(device.substr(prefix.size()));
    } else {
        require(device == "cuda", "Learner", "device", "'cpu', 'cuda' or 'cuda:N'", "'" + device + "'");
    }
    return make_cuda_backend(options);
}

/// What a learner and its plan are made from.
struct LearnerArguments {
    ModelSpec spec;
    LearnerOptions options;
    std::string device;
    int threads;
    bool deterministic, profile;
};

/// The parameters of Python's Learner, in the order of `learner_keywords`.
LearnerArguments learner_arguments(const ModelSpec& spec, std::int64_t max_tokens, const std::string& device, int threads,
                                   bool deterministic, std::int64_t head_rows, bool trainable, bool recompute, bool keep_logits,
                                   bool head_gradient_in_forward, bool border_adapters, bool lend_gradients, bool profile,
                                   const std::string& recipe, const std::string& logits_dtype, const std::string& gradient_dtype,
                                   const std::string& optimizer_state_dtype, bool master_weights, std::int64_t lora_rank, double lora_alpha,
                                   const std::vector<std::string>& lora_targets, std::uint64_t seed, std::size_t memory_limit) {
    LearnerOptions options;
    options.max_tokens = max_tokens;
    options.head_rows = head_rows;
    options.trainable = trainable;
    options.recompute = recompute;
    options.keep_logits = keep_logits;
    options.head_gradient_in_forward = head_gradient_in_forward;
    options.border_adapters = border_adapters;
    options.lend_gradients = lend_gradients;
    options.recipe.compute = dtype_from_name("recipe", recipe);
    options.recipe.logits = logits_dtype.empty() ? options.recipe.compute : dtype_from_name("logits_dtype", logits_dtype);
    options.recipe.gradient = dtype_from_name("gradient_dtype", gradient_dtype);
    options.recipe.state = dtype_from_name("optimizer_state_dtype", optimizer_state_dtype);
    options.recipe.master = master_weights;
    options.lora.rank = lora_rank;
    options.lora.alpha = static_cast<float>(lora_alpha);
    for (const std::string& target : lora_targets) options.lora.targets.push_back(linear_from_name(target));
    options.seed = seed;
    options.memory_limit = memory_limit;
    return {spec, options, device, threads, deterministic, profile};
}

auto learner_keywords() {
    return std::make_tuple(py::arg("spec"), py::kw_only(), py::arg("max_tokens"), py::arg("device") = "cpu", py::arg("threads") = 0,
                           py::arg("deterministic") = false, py::arg("head_rows") = 0, py::arg("trainable") = true,
                           py::arg("recompute") = false, py::arg("keep_logits") = false, py::arg("head_gradient_in_forward") = false,
                           py::arg("border_adapters") = false, py::arg("lend_gradients") = false, py::arg("profile") = false,
                           py::arg("recipe") = "float32", py::arg("logits_dtype") = "", py::arg("gradient_dtype") = "float32",
                           py::arg("optimizer_state_dtype") = "float32", py::arg("master_weights") = true, py::arg("lora_rank") = 0,
                           py::arg("lora_alpha") = 0.0, py::arg("lora_targets") = std::vector<std::string>{}, py::arg("seed") = 0,
                           py::arg("memory_limit") = 0);
}

/// body(LearnerArguments) as a function of those parameters.
template <typename Body, typename... Parameters>
auto of_arguments(LearnerArguments (*collect)(Parameters...), Body body) {
    return [collect, body](Parameters... parameters) { return body(collect(std::forward<Parameters>(parameters)...)); };
}

AdapterUse adapter_use(const char* op, const std::string& name) {
    if (name == "live") return AdapterUse::Live;
    if (name == "initial") return AdapterUse::Initial;
    if (name == "off") return AdapterUse::Off;
    fail(op, ": adapter: expected 'live', 'initial' or 'off', got '", name, "'");
}

/// A batch over numpy arrays, kept alive (and out of other threads' hands, as far as Python allows) for the duration of a call.
struct ArrayBatch {
    Int32Array tokens, positions, cu_seqlens, targets;
    Batch batch;

    ArrayBatch(const char* op, const py::object& tokens_in, const py::object& positions_in, const py::object& cu_seqlens_in,
               const py::object& targets_in)
        : tokens(int32_vector(op, "tokens", tokens_in)),
          positions(int32_vector(op, "positions", positions_in, tokens.shape(0))),
          cu_seqlens(int32_vector(op, "cu_seqlens", cu_seqlens_in)),
          targets(int32_vector(op, "targets", targets_in, tokens.shape(0))) {
        require(cu_seqlens.shape(0) > 0, op, "cu_seqlens", "at least one number", "none");
        batch = {tokens.data(), positions.data(), targets.data(), tokens.shape(0), {cu_seqlens.data(), cu_seqlens.shape(0) - 1}};
    }
};

py::tuple to_tuple(const TokenStats& stats, bool entropy) {
    return py::make_tuple(owned(stats.logp), entropy ? owned(stats.entropy) : py::none());
}

PassOptions pass_options(double temperature, std::int64_t valid_vocab, bool entropy, AdapterUse adapter) {
    return {static_cast<float>(temperature), valid_vocab, entropy, adapter};
}

py::tuple shape_of(const NamedTensor& named) {
    if (named.is_vector) return py::make_tuple(named.tensor.columns);
    return py::make_tuple(named.tensor.rows, named.tensor.columns);
}

/// A dense float32 array of exactly the tensor's shape.
Float32Array checked_value(const char* op, const NamedTensor& named, const py::object& value) {
    if (py::isinstance<Float32Array>(value)) {
        auto array = py::reinterpret_borrow<Float32Array>(value);
        if (shape_of(named).equal(array.attr("shape"))) return array;
    }
    fail(op, ": ", named.name, ": expected a C-contiguous float32 numpy array of shape ", std::string(py::str(shape_of(named))), ", got ",
         describe(value));
}

using TensorList = const std::vector<NamedTensor>& (Learner::*)() const;

template <TensorList list>
py::object export_tensor(Handle& handle, const char* op, const std::string& name) {
    const NamedTensor& named = Learner::find((handle.learner.*list)(), op, name);
    py::array_t<float> result(py::cast<std::vector<py::ssize_t>>(shape_of(named)));
    float* data = result.mutable_data();
    locked(handle, [&](Learner& learner) { learner.read(data, named); });
    return result;
}

template <TensorList list>
void load_tensor(Handle& handle, const char* op, const std::string& name, const py::object& value) {
    const NamedTensor& named = Learner::find((handle.learner.*list)(), op, name);
    const Float32Array array = checked_value(op, named, value);
    const float* data = array.data();
    locked(handle, [&](Learner& learner) { learner.write(named, data); });
}

void bind_spec(py::module_& module) {
    py::class_<ModelSpec>(module, "ModelSpec", "All in which the supported model families differ.")
        .def(py::init(&make_spec))
        .def_readwrite("layers", &ModelSpec::layers)
        .def_readwrite("hidden", &ModelSpec::hidden)
        .def_readwrite("heads", &ModelSpec::heads)
        .def_readwrite("kv_heads", &ModelSpec::kv_heads)
        .def_readwrite("head_dim", &ModelSpec::head_dim)
        .def_readwrite("ffn", &ModelSpec::ffn)
        .def_readwrite("vocab", &ModelSpec::vocab)
        .def_readwrite("max_positions", &ModelSpec::max_positions)
        .def_readwrite("norm_eps", &ModelSpec::norm_eps)
        .def_readwrite("activation", &ModelSpec::activation)
        .def_readwrite("qk_norm", &ModelSpec::qk_norm)
        .def_readwrite("qkv_bias", &ModelSpec::qkv_bias)
        .def_readwrite("o_bias", &ModelSpec::o_bias)
        .def_readwrite("mlp_bias", &ModelSpec::mlp_bias)
        .def_readwrite("tied", &ModelSpec::tied)
        .def_readwrite("rope_inv_freq", &ModelSpec::rope_inv_freq)
        .def_readwrite("rope_attention_scale", &ModelSpec::rope_attention_scale)
        .def_readwrite("windows", &ModelSpec::windows)
        .def("validate", &ModelSpec::validate);
}

}  // namespace

void bind_learner(py::module_& module) {
    bind_spec(module);
    module.def(
        "available_memory", [](const std::string& device) { return make_backend(device, 1, false)->available_memory(); }, py::arg("device"),
        "Bytes that a learner on this device could take now.");

    py::class_<StepStats>(module, "StepStats", "What one optimiser step did.")
        .def_readonly("grad_norm", &StepStats::grad_norm)
        .def_readonly("applied", &StepStats::applied)
        .def_readonly("step", &StepStats::step)
        .def("__repr__", [](const StepStats& stats) {
            return "StepStats(grad_norm=" + std::to_string(stats.grad_norm) + ", applied=" + (stats.applied ? "True" : "False") +
                   ", step=" + std::to_string(stats.step) + ")";
        });

    py::class_<Handle, std::shared_ptr<Handle>> learner(
        module, "Learner", "One model: log-probabilities, gradients, optimiser. Calls from several threads queue up.");
    const auto make = [](const LearnerArguments& given) {
        py::gil_scoped_release release;
        return std::make_shared<Handle>(make_backend(given.device, given.threads, given.deterministic, given.profile), given.spec,
                                        given.options);
    };
    const auto plan = [](const LearnerArguments& given) { return memory_list(Learner::plan(given.spec, given.options)); };
    std::apply(
        [&](const auto&... keywords) {
            learner.def(py::init(of_arguments(&learner_arguments, make)), keywords...)
                .def_static("plan", of_arguments(&learner_arguments, plan), keywords...);
        },
        learner_keywords());
    learner
        .def(
            "score",
            [](Handle& handle, const py::object& tokens, const py::object& positions, const py::object& cu_seqlens,
               const py::object& targets, double temperature, std::int64_t valid_vocab, bool entropy, const std::string& adapter) {
                const ArrayBatch arrays("score", tokens, positions, cu_seqlens, targets);
                const PassOptions options = pass_options(temperature, valid_vocab, entropy, adapter_use("score", adapter));
                return to_tuple(locked(handle, [&](Learner& learner) { return learner.score(arrays.batch, options); }), entropy);
            },
            py::arg("tokens"), py::arg("positions"), py::arg("cu_seqlens"), py::arg("targets"), py::kw_only(), py::arg("temperature") = 1.0,
            py::arg("valid_vocab") = 0, py::arg("entropy") = false, py::arg("adapter") = "live")
        .def(
            "forward",
            [](Handle& handle, const py::object& tokens, const py::object& positions, const py::object& cu_seqlens,
               const py::object& targets, double temperature, std::int64_t valid_vocab, bool entropy) {
                const ArrayBatch arrays("forward", tokens, positions, cu_seqlens, targets);
                const PassOptions options = pass_options(temperature, valid_vocab, entropy, AdapterUse::Live);
                return to_tuple(locked(handle, [&](Learner& learner) { return learner.forward(arrays.batch, options); }), entropy);
            },
            py::arg("tokens"), py::arg("positions"), py::arg("cu_seqlens"), py::arg("targets"), py::kw_only(), py::arg("temperature") = 1.0,
            py::arg("valid_vocab") = 0, py::arg("entropy") = false)
        .def(
            "backward",
            [](Handle& handle, const py::object& dlogp, const py::object& dentropy) {
                const Float32Array d_logp = float32_vector("backward", "dlogp", dlogp);
                const auto size = static_cast<std::int64_t>(d_logp.shape(0));
                const Float32Array d_entropy = dentropy.is_none() ? Float32Array() : float32_vector("backward", "dentropy", dentropy, size);
                const float* d_entropy_data = dentropy.is_none() ? nullptr : d_entropy.data();
                const float* d_logp_data = d_logp.data();
                locked(handle, [&](Learner& learner) {
                    const std::int64_t pending = learner.pending_tokens();
                    if (pending >= 0) require(pending == size, "backward", "dlogp", pending, size);
                    learner.backward(d_logp_data, d_entropy_data);
                });
            },
            py::arg("dlogp"), py::arg("dentropy") = py::none())
        .def(
            "forward_backward",
            [](Handle& handle, const py::object& tokens, const py::object& positions, const py::object& cu_seqlens,
               const py::object& targets, const py::object& dlogp, const py::object& dentropy, double temperature,
               std::int64_t valid_vocab) {
                const char* op = "forward_backward";
                const ArrayBatch arrays(op, tokens, positions, cu_seqlens, targets);
                const bool entropy = !dentropy.is_none();
                const Float32Array d_logp = float32_vector(op, "dlogp", dlogp, arrays.batch.size);
                const Float32Array d_entropy = entropy ? float32_vector(op, "dentropy", dentropy, arrays.batch.size) : Float32Array();
                const float* d_logp_data = d_logp.data();
                const float* d_entropy_data = entropy ? d_entropy.data() : nullptr;
                const PassOptions options = pass_options(temperature, valid_vocab, entropy, AdapterUse::Live);
                return to_tuple(
                    locked(handle,
                           [&](Learner& learner) { return learner.forward_backward(arrays.batch, options, d_logp_data, d_entropy_data); }),
                    entropy);
            },
            py::arg("tokens"), py::arg("positions"), py::arg("cu_seqlens"), py::arg("targets"), py::arg("dlogp"),
            py::arg("dentropy") = py::none(), py::kw_only(), py::arg("temperature") = 1.0, py::arg("valid_vocab") = 0)
        .def("discard_pending", [](Handle& handle) { locked(handle, [](Learner& learner) { learner.discard_pending(); }); })
        .def(
            "step",
            [](Handle& handle, double learning_rate, double max_grad_norm, double beta1, double beta2, double epsilon,
               double weight_decay) {
                const StepOptions options{static_cast<float>(learning_rate), static_cast<float>(max_grad_norm),
                                          static_cast<float>(beta1),         static_cast<float>(beta2),
                                          static_cast<float>(epsilon),       static_cast<float>(weight_decay)};
                return locked(handle, [&](Learner& learner) { return learner.step(options); });
            },
            py::arg("learning_rate"), py::kw_only(), py::arg("max_grad_norm") = 0.0, py::arg("beta1") = 0.9, py::arg("beta2") = 0.999,
            py::arg("epsilon") = 1e-8, py::arg("weight_decay") = 0.0)
        .def("zero_gradients", [](Handle& handle) { locked(handle, [](Learner& learner) { learner.zero_gradients(); }); })
        .def("tensors",
             [](Handle& handle) {
                 py::list result;
                 for (const NamedTensor& named : handle.learner.tensors()) {
                     result.append(py::make_tuple(named.name, shape_of(named), named.trainable));
                 }
                 return result;
             })
        .def(
            "load",
            [](Handle& handle, const std::string& name, const py::object& value) {
                const Float32Array array = checked_value("load", Learner::find(handle.learner.tensors(), "load", name), value);
                const float* data = array.data();
                locked(handle, [&](Learner& learner) { learner.load(name, data); });
            },
            py::arg("name"), py::arg("value"))
        .def(
            "export", [](Handle& handle, const std::string& name) { return export_tensor<&Learner::tensors>(handle, "export", name); },
            py::arg("name"))
        .def(
            "export_to",
            [](Handle& handle, const std::vector<std::tuple<std::string, std::uintptr_t>>& places, const std::string& dtype) {
                const DType kind = dtype_from_name("dtype", dtype);
                std::vector<Learner::Export> exports;
                exports.reserve(places.size());
                for (const auto& [name, place] : places) {
                    const NamedTensor& named = Learner::find(handle.learner.tensors(), "export_to", name);
                    require(place % size_of(kind) == 0, "export_to", name.c_str(), "memory that is aligned to its values", place);
                    exports.push_back({&named, matrix(reinterpret_cast<void*>(place), named.tensor.rows, named.tensor.columns, kind,
                                                      handle.learner.backend().device())});
                }
                locked(handle, [&](Learner& learner) { learner.export_to(exports); });
            },
            py::arg("places"), py::arg("dtype"))
        .def(
            "gradient",
            [](Handle& handle, const std::string& name) { return export_tensor<&Learner::gradients>(handle, "gradient", name); },
            py::arg("name"))
        .def(
            "add_to_gradient",
            [](Handle& handle, const std::string& name, const py::object& value) {
                const NamedTensor& named = Learner::find(handle.learner.gradients(), "add_to_gradient", name);
                const Float32Array array = checked_value("add_to_gradient", named, value);
                const float* data = array.data();
                locked(handle, [&](Learner& learner) {
                    std::vector<float> sum(static_cast<std::size_t>(named.tensor.size()));
                    learner.read(sum.data(), named);
                    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += data[i];
                    learner.write(named, sum.data());
                });
            },
            py::arg("name"), py::arg("value"))
        .def("optimizer_state",
             [](Handle& handle) {
                 py::list result;
                 for (const NamedTensor& named : handle.learner.optimizer_state())
                     result.append(py::make_tuple(named.name, shape_of(named)));
                 return result;
             })
        .def(
            "load_optimizer",
            [](Handle& handle, const std::string& name, const py::object& value) {
                load_tensor<&Learner::optimizer_state>(handle, "load_optimizer", name, value);
            },
            py::arg("name"), py::arg("value"))
        .def(
            "export_optimizer",
            [](Handle& handle, const std::string& name) {
                return export_tensor<&Learner::optimizer_state>(handle, "export_optimizer", name);
            },
            py::arg("name"))
        .def_property(
            "update_count", [](Handle& handle) { return locked(handle, [](Learner& learner) { return learner.update_count(); }); },
            [](Handle& handle, std::int64_t count) { locked(handle, [&](Learner& learner) { learner.set_update_count(count); }); })
        .def("snapshot_adapter", [](Handle& handle) { locked(handle, [](Learner& learner) { learner.snapshot_adapter(); }); })
        .def("memory", [](Handle& handle) { return memory_list(handle.learner.memory()); })
        .def("workspace_bytes",
             [](Handle& handle) { return locked(handle, [](Learner& learner) { return learner.backend().own_bytes(); }); });
}

}  // namespace surogate
