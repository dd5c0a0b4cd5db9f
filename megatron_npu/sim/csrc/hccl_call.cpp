#include "hccl_call.h"

namespace sim::hccl {

namespace {

struct Type {
  const char* name;
  size_t bytes;
};

Type type_of(uint32_t dtype) {
  switch (dtype) {
    case HCCL_DATA_TYPE_INT8: return {"int8", 1};
    case HCCL_DATA_TYPE_INT16: return {"int16", 2};
    case HCCL_DATA_TYPE_INT32: return {"int32", 4};
    case HCCL_DATA_TYPE_FP16: return {"fp16", 2};
    case HCCL_DATA_TYPE_FP32: return {"fp32", 4};
    case HCCL_DATA_TYPE_INT64: return {"int64", 8};
    case HCCL_DATA_TYPE_UINT64: return {"uint64", 8};
    case HCCL_DATA_TYPE_UINT8: return {"uint8", 1};
    case HCCL_DATA_TYPE_UINT16: return {"uint16", 2};
    case HCCL_DATA_TYPE_UINT32: return {"uint32", 4};
    case HCCL_DATA_TYPE_FP64: return {"fp64", 8};
    case HCCL_DATA_TYPE_BFP16: return {"bf16", 2};
    case HCCL_DATA_TYPE_INT128: return {"int128", 16};
    case HCCL_DATA_TYPE_HIF8: return {"hif8", 1};
    case HCCL_DATA_TYPE_FP8E4M3: return {"fp8e4m3", 1};
    case HCCL_DATA_TYPE_FP8E5M2: return {"fp8e5m2", 1};
    case HCCL_DATA_TYPE_FP8E8M0: return {"fp8e8m0", 1};
    default: return {"unknown type", 0};
  }
}

const char* name_of_reduction(uint32_t reduction) {
  switch (reduction) {
    case HCCL_REDUCE_SUM: return "sum";
    case HCCL_REDUCE_PROD: return "prod";
    case HCCL_REDUCE_MAX: return "max";
    case HCCL_REDUCE_MIN: return "min";
    default: return "unknown reduction";
  }
}

bool counts_differ_by_rank(Operation operation) {
  return operation == Operation::AllGatherV || operation == Operation::ReduceScatterV ||
         operation == Operation::AlltoAllV;
}

}  // namespace

bool operator==(const Call& one, const Call& other) {
  return one.operation == other.operation && one.dtype == other.dtype && one.reduction == other.reduction &&
         one.root == other.root && one.count == other.count && one.sequence == other.sequence;
}

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::AllReduce: return "AllReduce";
    case Operation::Reduce: return "Reduce";
    case Operation::ReduceScatter: return "ReduceScatter";
    case Operation::ReduceScatterV: return "ReduceScatterV";
    case Operation::AllGather: return "AllGather";
    case Operation::AllGatherV: return "AllGatherV";
    case Operation::Broadcast: return "Broadcast";
    case Operation::Scatter: return "Scatter";
    case Operation::AlltoAll: return "AlltoAll";
    case Operation::AlltoAllV: return "AlltoAllV";
    case Operation::Barrier: return "Barrier";
    case Operation::SendReceive: return "message";
  }
  return "unknown operation";
}

std::string describe(const Call& call) {
  std::string text = name_of(call.operation);
  if (call.sequence != 0) text += " #" + std::to_string(call.sequence);
  if (call.operation == Operation::Barrier) return text;
  text += " (";
  if (!counts_differ_by_rank(call.operation)) text += std::to_string(call.count) + " x ";
  text += type_of(call.dtype).name;
  if (call.reduction != kNone) text += std::string(", ") + name_of_reduction(call.reduction);
  if (call.root != kNone) text += ", root " + std::to_string(call.root);
  return text + ")";
}

size_t size_of(uint32_t dtype) { return type_of(dtype).bytes; }

}  // namespace sim::hccl
