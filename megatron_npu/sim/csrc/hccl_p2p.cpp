// Send and receive, singly and in batches. HcclGroupStart and HcclGroupEnd are in hccl_communicator.cpp.
#include <set>

#include "hccl_communicator.h"
#include "runtime.h"

using namespace sim::hccl;

SIM_API HcclResult HcclSend(void* data, uint64_t count, HcclDataType dtype, uint32_t destination,
                            HcclComm handle, void* stream) {
  return submit(handle, stream, "Send", {{true, destination, data, count, static_cast<uint32_t>(dtype)}});
}

SIM_API HcclResult HcclRecv(void* data, uint64_t count, HcclDataType dtype, uint32_t source, HcclComm handle,
                            void* stream) {
  return submit(handle, stream, "Recv", {{false, source, data, count, static_cast<uint32_t>(dtype)}});
}

// The order of the items is free, but no two may have the same peer and direction (documentation of
// HcclBatchSendRecv, CANN 8.0: "must not contain duplicate sending or receiving tasks pointed to the same
// rank").
SIM_API HcclResult HcclBatchSendRecv(const HcclSendRecvItem* items, uint32_t number, HcclComm handle,
                                     void* stream) {
  std::vector<Message> messages;
  std::set<std::pair<bool, uint32_t>> seen;
  for (uint32_t i = 0; i < number; i++) {
    const HcclSendRecvItem& item = items[i];
    const bool outgoing = item.type == HCCL_SEND;
    if (!seen.insert({outgoing, item.remote_rank}).second) {
      return refuse(HCCL_E_PARA, std::string("BatchSendRecv: two items ") +
                                     (outgoing ? "send to" : "receive from") + " rank " +
                                     std::to_string(item.remote_rank) +
                                     "; HCCL admits one per peer and direction");
    }
    messages.push_back(
        {outgoing, item.remote_rank, item.buffer, item.count, static_cast<uint32_t>(item.dtype)});
  }
  return submit(handle, stream, "BatchSendRecv", messages);
}
