#include "model/recipe.h"

#include <utility>

#include "core/error.h"

namespace surogate {

void Recipe::validate() const {
    const std::pair<const char*, DType> formats[] = {
        {"recipe", compute}, {"logits_dtype", logits}, {"gradient_dtype", gradient}, {"optimizer_state_dtype", state}};
    for (const auto& [name, dtype] : formats) {
        require(dtype == DType::Float32 || dtype == DType::BFloat16, "Learner", name, "float32 or bfloat16", name_of(dtype));
        require(compute == DType::BFloat16 || dtype == DType::Float32, "Learner", name, "float32 with the float32 recipe", name_of(dtype));
    }
}

DType dtype_from_name(const char* name, const std::string& value) {
    for (const DType dtype : {DType::Float32, DType::BFloat16}) {
        if (value == name_of(dtype)) return dtype;
    }
    fail("Learner: ", name, ": expected float32 or bfloat16, got '", value, "'");
}

}  // namespace surogate
