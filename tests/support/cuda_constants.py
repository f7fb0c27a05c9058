"""The constants of cuda.bindings.driver that the CUDA layer uses, with their numbers.

tests/cuda/test_fake_driver.py holds them against the real ones.
"""

from __future__ import annotations

from enum import IntEnum

CUresult = IntEnum(
    "CUresult",
    {
        "CUDA_SUCCESS": 0,
        "CUDA_ERROR_INVALID_VALUE": 1,
        "CUDA_ERROR_OUT_OF_MEMORY": 2,
        "CUDA_ERROR_NO_DEVICE": 100,
        "CUDA_ERROR_INVALID_DEVICE": 101,
        "CUDA_ERROR_INVALID_IMAGE": 200,
        "CUDA_ERROR_INVALID_CONTEXT": 201,
        "CUDA_ERROR_ECC_UNCORRECTABLE": 214,
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": 217,
        "CUDA_ERROR_INVALID_PTX": 218,
        "CUDA_ERROR_INVALID_HANDLE": 400,
        "CUDA_ERROR_NOT_FOUND": 500,
        "CUDA_ERROR_NOT_READY": 600,
        "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
        "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED": 704,
        "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": 712,
        "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": 713,
        "CUDA_ERROR_NOT_PERMITTED": 800,
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": 803,
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": 901,
        "CUDA_ERROR_UNKNOWN": 999,
    },
)
ATTRIBUTES = {
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": (97, 232448),
    "MULTIPROCESSOR_COUNT": (16, 132),
    "L2_CACHE_SIZE": (38, 60 << 20),
    "ASYNC_ENGINE_COUNT": (40, 3),
    "COMPUTE_CAPABILITY_MAJOR": (75, 9),
    "COMPUTE_CAPABILITY_MINOR": (76, 0),
    "HOST_REGISTER_SUPPORTED": (99, 1),
    "READ_ONLY_HOST_REGISTER_SUPPORTED": (113, 1),
}
CUdevice_attribute = IntEnum(  # type: ignore[misc]
    "CUdevice_attribute",
    {f"CU_DEVICE_ATTRIBUTE_{n}": number for n, (number, _) in ATTRIBUTES.items()},
)
CUevent_flags = IntEnum("CUevent_flags", {"CU_EVENT_DEFAULT": 0, "CU_EVENT_DISABLE_TIMING": 2})
CUstream_flags = IntEnum("CUstream_flags", {"CU_STREAM_NON_BLOCKING": 1})
CUmemcpySrcAccessOrder = IntEnum("CUmemcpySrcAccessOrder", {"CU_MEMCPY_SRC_ACCESS_ORDER_STREAM": 1})
CUstreamCaptureMode = IntEnum("CUstreamCaptureMode", {"CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1})
CUjitInputType = IntEnum("CUjitInputType", {"CU_JIT_INPUT_PTX": 1})
CUjit_option = IntEnum(
    "CUjit_option", {"CU_JIT_ERROR_LOG_BUFFER": 5, "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES": 6}
)
CUfunction_attribute = IntEnum(
    "CUfunction_attribute", {"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8}
)
CUlaunchAttributeID = IntEnum(
    "CUlaunchAttributeID", {"CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 6}
)
CUstreamCaptureStatus = IntEnum(
    "CUstreamCaptureStatus",
    {"CU_STREAM_CAPTURE_STATUS_NONE": 0, "CU_STREAM_CAPTURE_STATUS_ACTIVE": 1},
)
CUgraphDependencyType = IntEnum(
    "CUgraphDependencyType", {"CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC": 1}
)
ENUMS = (
    *(CUresult, CUdevice_attribute, CUevent_flags, CUstream_flags, CUstreamCaptureMode),
    *(CUjitInputType, CUjit_option, CUfunction_attribute, CUlaunchAttributeID),
    *(CUmemcpySrcAccessOrder, CUstreamCaptureStatus, CUgraphDependencyType),
)
