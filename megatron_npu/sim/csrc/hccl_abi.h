// The part of HCCL's binary interface that torch_npu uses. Values and layouts are those of hccl_types.h,
// which the torch_npu wheel ships (2.6 to 2.14 agree on what is here).
#pragma once

#include <cstddef>
#include <cstdint>

enum HcclResult : int {
  HCCL_SUCCESS = 0,
  HCCL_E_PARA = 1,
  HCCL_E_PTR = 2,
  HCCL_E_INTERNAL = 4,
  HCCL_E_NOT_SUPPORT = 5,
  HCCL_E_SYSCALL = 8,
  HCCL_E_TIMEOUT = 9,
  HCCL_E_REMOTE = 21,
};

enum HcclReduceOp : int {
  HCCL_REDUCE_SUM = 0,
  HCCL_REDUCE_PROD = 1,
  HCCL_REDUCE_MAX = 2,
  HCCL_REDUCE_MIN = 3,
};

enum HcclDataType : int {
  HCCL_DATA_TYPE_INT8 = 0,
  HCCL_DATA_TYPE_INT16 = 1,
  HCCL_DATA_TYPE_INT32 = 2,
  HCCL_DATA_TYPE_FP16 = 3,
  HCCL_DATA_TYPE_FP32 = 4,
  HCCL_DATA_TYPE_INT64 = 5,
  HCCL_DATA_TYPE_UINT64 = 6,
  HCCL_DATA_TYPE_UINT8 = 7,  // torch_npu sends bool as this
  HCCL_DATA_TYPE_UINT16 = 8,
  HCCL_DATA_TYPE_UINT32 = 9,
  HCCL_DATA_TYPE_FP64 = 10,
  HCCL_DATA_TYPE_BFP16 = 11,
  HCCL_DATA_TYPE_INT128 = 12,
  HCCL_DATA_TYPE_HIF8 = 14,
  HCCL_DATA_TYPE_FP8E4M3 = 15,
  HCCL_DATA_TYPE_FP8E5M2 = 16,
  HCCL_DATA_TYPE_FP8E8M0 = 17,
};

using HcclComm = void*;

// What rank 0 makes and torch.distributed's store carries to the others.
constexpr size_t HCCL_ROOT_INFO_BYTES = 4108;
struct HcclRootInfo {
  char internal[HCCL_ROOT_INFO_BYTES];
};

// The head of HcclCommConfig, equal in all versions. What follows tunes buffers, algorithms and retries of
// real links, which have no counterpart here.
constexpr size_t COMM_NAME_MAX_LENGTH = 128;
struct HcclCommConfig {
  char reserved[24];
  uint32_t buffer_size;
  uint32_t deterministic;
  char name[COMM_NAME_MAX_LENGTH];
};

enum HcclSendRecvType : int { HCCL_SEND = 0, HCCL_RECV = 1 };
struct HcclSendRecvItem {
  HcclSendRecvType type;
  void* buffer;
  uint64_t count;
  HcclDataType dtype;
  uint32_t remote_rank;
};
