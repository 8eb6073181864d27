#include <cstring>
#include <string>

#include "bind/bind.h"
#include "core/error.h"

namespace py = pybind11;

namespace surogate {

namespace {

template <typename T>
py::array_t<T, py::array::c_style> checked_vector(const char* op, const char* name, const py::object& value, std::int64_t size) {
    using Array = py::array_t<T, py::array::c_style>;
    if (py::isinstance<Array>(value)) {
        auto array = py::reinterpret_borrow<Array>(value);
        if (array.ndim() == 1 && (size < 0 || array.shape(0) == size)) return array;
    }
    const std::string dtype = py::str(py::dtype::of<T>());
    const std::string length = size < 0 ? "any length" : "length " + std::to_string(size);
    fail(op, ": ", name, ": expected a C-contiguous ", dtype, " numpy array of one dimension and ", length, ", got ", describe(value));
}

}  // namespace

std::string describe(const py::object& value) {
    if (!py::isinstance<py::array>(value)) return "a " + std::string(py::str(py::type::of(value).attr("__name__")));
    const auto array = py::reinterpret_borrow<py::array>(value);
    std::string text = std::string(py::str(array.dtype())) + " of shape " + std::string(py::str(array.attr("shape")));
    if ((array.flags() & py::array::c_style) == 0) text += ", not C-contiguous";
    return text;
}

Int32Array int32_vector(const char* op, const char* name, const py::object& value, std::int64_t size) {
    return checked_vector<std::int32_t>(op, name, value, size);
}

Float32Array float32_vector(const char* op, const char* name, const py::object& value, std::int64_t size) {
    return checked_vector<float>(op, name, value, size);
}

py::object owned(const std::vector<float>& values) {
    py::array_t<float> result(static_cast<py::ssize_t>(values.size()));
    if (!values.empty()) std::memcpy(result.mutable_data(), values.data(), values.size() * sizeof(float));
    return result;
}

py::list memory_list(const std::vector<MemoryItem>& items) {
    py::list result;
    for (const MemoryItem& item : items) result.append(py::make_tuple(item.name, item.bytes));
    return result;
}

}  // namespace surogate
