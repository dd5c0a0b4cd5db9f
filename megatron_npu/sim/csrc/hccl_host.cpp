#include "hccl_host.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>

#include "runtime.h"

namespace sim::hccl {

namespace {

int64_t number_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value && *value ? std::atoll(value) : 0;
}

// The text of an address; empty if there is none.
std::string text_of(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  return getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

// The own address on the way to a host: connecting a datagram's socket chooses it, and sends nothing.
std::string address_towards(const char* host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host, "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  for (const addrinfo* each = found; each; each = each->ai_next) {
    const int file = socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    const bool known = file >= 0 && connect(file, each->ai_addr, each->ai_addrlen) == 0 &&
                       getsockname(file, reinterpret_cast<sockaddr*>(&own), &length) == 0;
    if (file >= 0) close(file);
    if (known) return text_of(reinterpret_cast<sockaddr*>(&own), length);
  }
  return "";
}

}  // namespace

uint64_t host_id() {
  static const uint64_t id = [] {
    std::string text = setting("host", "");
    if (text.empty()) {
      std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
      char space[64] = "";
      const ssize_t length = readlink("/proc/self/ns/pid", space, sizeof space - 1);
      text.append(space, length > 0 ? length : 0);
    }
    return static_cast<uint64_t>(std::hash<std::string>{}(text));
  }();
  return id;
}

bool spans_hosts() {
  const int64_t here = number_of("LOCAL_WORLD_SIZE");
  return !setting("host", "").empty() || (here > 0 && number_of("WORLD_SIZE") > here);
}

std::string host_name() {
  const std::string given = setting("host", "");
  if (!given.empty()) return given.substr(0, kHostNameBytes - 1);
  char name[kHostNameBytes] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string own_address() {
  const char* given = std::getenv("HCCL_IF_IP");
  if (given && *given) return given;
  const char* master = std::getenv("MASTER_ADDR");
  const std::string found = master && *master ? address_towards(master) : "";
  return found.empty() || found.size() >= kAddressBytes ? "127.0.0.1" : found;
}

}  // namespace sim::hccl
