// Reduction of the contributions of all ranks to one result.
#pragma once

#include <vector>

#include "hccl_call.h"

namespace sim::hccl {

// Whether Ascend's documentation of HcclAllReduce, HcclReduce and HcclReduceScatter admits the combination
// on Atlas A2: int8, int16, int32, int64, fp16, fp32 and bf16, but no product of int16 or bf16.
bool can_reduce(uint32_t dtype, uint32_t reduction);

// result[i] = parts[0][i] o parts[1][i] o ... in the order of ranks, so that every rank computes the same
// bits, run after run. 16-bit floats accumulate in fp32 and are rounded once at the end; the accuracy of
// real links, which may round after each step, is not imitated. `result` may be one of `parts`.
void reduce(char* result, const std::vector<const char*>& parts, size_t count, uint32_t dtype,
            uint32_t reduction);

}  // namespace sim::hccl
