"""The rows of the hardware table: the published numbers of devices, by the name that the driver reports.

Peaks are the vendor's dense rates of one device at boost clock, on the fastest unit for the precision, with
accumulation in FP32 or wider.  Definitions and the whole table: docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from effllm.devices.known.sensors import SENSORS, KnownSensor

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")

# How a document's numbers were checked: it was read, a text that quotes them was read, or nothing was read.
Evidence = Literal["read", "quoted", "unconfirmed"]


@dataclass(frozen=True)
class Origin:
    """The document with a row's numbers."""

    title: str
    url: str
    evidence: Evidence


@dataclass(frozen=True)
class Hardware:
    """One device as the driver counts devices: a GPU, or one die of a module with two dies."""

    names: tuple[str, ...]  # the first name is the name that the driver uses
    architecture: str
    flops_per_s: Mapping[str, float]  # by precision; unsupported and unpublished precisions are left out
    memory_bytes: int | None  # None if boards with different memory have the same name
    memory_bytes_per_s: float | None
    tdp_w: float | None
    source: Origin
    sensor: KnownSensor
    note: str = ""
    gain_measured: tuple[float, float] | None = None  # range of the readings' relative error, measured with a meter
    sliced: bool = False  # whether the driver's name is that of a MIG slice; all values are those of the whole device


# fmt: off
# --- sources -------------------------------------------------------------------------------------

_NV = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_AMD = "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs"

_P100 = Origin("NVIDIA Tesla P100 PCIe datasheet (2016)",
    f"{_NV}/Data-Center/tesla-p100/pdf/nvidia-tesla-p100-PCIe-datasheet.pdf", "quoted")
_P100_SXM = Origin("NVIDIA, Ampere Architecture In-Depth (May 2020), table of P100, V100 and A100",
    "https://developer.nvidia.com/blog/nvidia-ampere-architecture-in-depth/", "read")
_P40 = Origin("NVIDIA Tesla P40 datasheet (2016)",
    "https://images.nvidia.com/content/pdf/tesla/184427-Tesla-P40-Datasheet-NV-Final-Letter-Web.pdf", "quoted")
_V100 = Origin("NVIDIA V100 datasheet 1165301-r5 (2020)",
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf", "quoted")
_V100_CHIP = Origin("the V100-SXM2 has the same chip (V100 datasheet); the power was printed by nvidia-smi",
    _V100.url, "unconfirmed")
_T4 = Origin(
    "NVIDIA T4 datasheet 951643 (2019)", f"{_NV}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf", "quoted")
_TURING = Origin("NVIDIA Turing GPU Architecture (2018), column of the Quadro RTX 6000",
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/"
    "turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf", "read")
_TURING_BLOG = Origin("NVIDIA, Turing Architecture In-Depth (Sept 2018), columns of Founders Editions",
    "https://developer.nvidia.com/blog/nvidia-turing-architecture-in-depth/", "read")
_TITAN_RTX = Origin("computed: 72 SMs x 1024 FLOP x 1.77 GHz, as for the Quadro RTX 6000", _TURING.url, "unconfirmed")
_A100 = Origin("NVIDIA A100 datasheets 1758950 (June 2021) and 2188504 (May 2022)",
    f"{_NV}/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf", "quoted")
_A800 = Origin(
    "NVIDIA A100 datasheet 2188504 (May 2022); NVIDIA has withdrawn the page of the A800", _A100.url, "unconfirmed")
_A100_64 = Origin("computed: 124 SMs x 2048 FLOP x 1.41 GHz; slides of CINECA state 22.4 TFLOP/s of FP32",
    "https://leonardo-supercomputer.cineca.eu/hpc-system", "unconfirmed")
_A30 = Origin("NVIDIA A30 datasheet; NVIDIA/TensorRT-LLM, cluster_info.py",
    f"{_NV}/data-center/products/a30-gpu/pdf/a30-datasheet.pdf", "quoted")
_A10 = Origin("NVIDIA A10 datasheet; NVIDIA/TensorRT-LLM, cluster_info.py",
    f"{_NV}/Data-Center/a10/pdf/datasheet-new/nvidia-a10-datasheet.pdf", "quoted")
_A2 = Origin("computed: 10 SMs x 1024 FLOP x 1.77 GHz, as for the A10",
    "https://www.nvidia.com/en-us/data-center/products/a2/", "unconfirmed")
_A10G = Origin("NVIDIA/TensorRT-LLM, auto_parallel/cluster_info.py (commit 16d2467)",
    "https://github.com/NVIDIA/TensorRT-LLM", "read")
_A40 = Origin("NVIDIA A40 datasheet; NVIDIA/TensorRT-LLM, cluster_info.py",
    "https://images.nvidia.cn/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf", "quoted")
_GA102 = Origin("NVIDIA Ampere GA102 GPU Architecture v2 (2021), table 3",
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf", "quoted")
_RTX_A = Origin("NVIDIA RTX A5000 and RTX A4000 datasheets: half of the sparse rates",
    f"{_NV}/products/workstations/nvidia-rtx-a5000-datasheet.pdf", "quoted")
_GA102_COUNTED = Origin(
    "computed: SMs x 512 FLOP x boost clock, as for the RTX 3090 in GA102 Architecture v2", _GA102.url, "unconfirmed")
_RTX_3070_TI = Origin("NVIDIA RTX Blackwell GPU Architecture, appendix B, table 5; quoted in redai-studio/Relax#83",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf", "quoted")
_ADA = Origin("NVIDIA Ada GPU Architecture v2.1, appendix A",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf", "quoted")
_ADA_COUNTED = Origin(
    "computed: SMs x 512 FLOP x boost clock, as for the RTX 4090 in Ada GPU Architecture v2.1", _ADA.url, "unconfirmed")
_RTX_ADA = Origin("NVIDIA RTX 5000 and 4000 Ada Generation datasheets: a quarter of the sparse FP8 rates",
    "https://www.nvidia.com/en-us/design-visualization/rtx-5000/", "quoted")
_L4 = Origin("NVIDIA Ada GPU Architecture v2.02 (2022), appendix D; L4 product brief PB-11316-001_v01 (March 2023)",
    _ADA.url, "quoted")
_L20 = Origin("tables of dealers and cluster_info.py of NVIDIA/TensorRT-LLM, because NVIDIA has published no datasheet",
    "https://github.com/NVIDIA/TensorRT-LLM", "unconfirmed")
_L40 = Origin("NVIDIA L40 datasheet 2436245 (Nov 2022)",
    f"{_NV}/design-visualization/support-guide/NVIDIA-L40-Datasheet-January-2023.pdf", "quoted")
_L40S = Origin("NVIDIA L40S datasheet 2841316 (Aug 2023), product brief PB-11470-001_v02",
    "https://www.nvidia.com/en-us/data-center/l40s/", "quoted")
_RTX_PRO = Origin("NVIDIA RTX Blackwell PRO GPU Architecture v1.0, table 4",
    f"{_NV}/design-visualization/quadro-product-literature/NVIDIA-RTX-Blackwell-PRO-GPU-Architecture-v1.0.pdf",
    "quoted")
_RTX_PRO_SERVER = Origin("NVIDIA RTX PRO 6000 Blackwell Server Edition page and datasheet (Dec 2025)",
    "https://www.nvidia.com/en-us/data-center/rtx-pro-6000-blackwell-server-edition/", "unconfirmed")
_RTX_50 = Origin("NVIDIA RTX Blackwell GPU Architecture v1.1, table 3",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf", "quoted")
_RTX_5090_D = Origin("the RTX 5090 has as many SMs and the same clock", _RTX_50.url, "unconfirmed")
_H100 = Origin("NVIDIA H100 GPU Architecture v1.04 (2022), tables 1 and 3; datasheet 3440270 (Sept 2024)",
    "https://nvdam.widen.net/s/95bdhpsgrs/nvidia_h100_tensor_core_gpu_architecture_whitepaper_v1.03", "quoted")
_H100_OTHERS = Origin("the H100 with 80 GB has the same chip; TSUBAME 4.0 has 992 TFLOP/s per GPU with 94 GB",
    _H100.url, "unconfirmed")
_H100_PCIE = Origin(
    "NVIDIA H100 GPU Architecture v1.04 (2022); product brief PB-11133-001_v02 (Nov 2022)", _H100.url, "quoted")
_H100_NVL = Origin("half the sparse rates of NVIDIA H100 datasheet 3440270 (Sept 2024); "
    "product brief PB-11773-001_v01 (March 2024)",
    "https://www.nvidia.com/en-us/data-center/h100/", "quoted")
_H200 = Origin("NVIDIA H200 datasheet 3367400 (July 2024); the H100 has the same chip and peaks",
    "https://www.nvidia.com/en-us/data-center/h200/", "quoted")
_H200_NVL = Origin(
    "half the sparse rates of NVIDIA's H200 page (2026); H200 NVL product brief PB-12128-001_v01 (April 2025)",
    _H200.url, "quoted")
_H800 = Origin("NVIDIA H800 datasheet (2023); the H100 has the same chip and peaks",
    "https://chaoqing-i.com/upload/20231128/NVIDIA%20H800%20GPU%20Datasheet.pdf", "quoted")
_H20 = Origin("cluster_info.py of NVIDIA/TensorRT-LLM and papers on training with H20s, because NVIDIA has "
    "published no datasheet",
    "https://github.com/NVIDIA/TensorRT-LLM", "unconfirmed")
_GH200 = Origin("NVIDIA GH200 Grace Hopper Superchip datasheet (not checked); the H100 has the same chip and peaks",
    "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip", "unconfirmed")
_BLACKWELL = Origin("half the sparse rates per GPU of NVIDIA Blackwell datasheet 3384703; "
    "README of NVIDIA/exemplar-performance",
    "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703", "quoted")
_ULTRA = Origin("NVIDIA Blackwell Ultra datasheet (Oct 2025) and Blackwell Architecture Technical Brief v2.1, table 3",
    "https://resources.nvidia.com/en-us-blackwell-architecture/blackwell-ultra-datasheet", "quoted")
_GB10 = Origin("NVIDIA DGX Spark page: 1 PFLOP of sparse FP4, 140 W; the other rates are computed by halving this rate",
    "https://docs.nvidia.com/dgx/dgx-spark/hardware.html", "unconfirmed")
_THOR = Origin("NVIDIA Jetson Thor page: half of the sparse rates",
    "https://www.nvidia.com/en-us/autonomous-machines/embedded-systems/jetson-thor/", "quoted")
_MI100 = Origin("AMD, footnotes MI100-03 and -08 and CDNA-04 (Oct 2020)",
    "https://www.amd.com/en/products/accelerators/instinct/mi100.html", "read")
_MI210 = Origin("AMD Instinct MI210 brochure",
    "https://www.amd.com/content/dam/amd/en/documents/instinct-business-docs/product-briefs/"
    "instinct-mi210-brochure.pdf", "quoted")
_CDNA3 = Origin("AMD, Introducing AMD CDNA 3 Architecture (2025 edition), table 2 and footnotes",
    f"{_AMD}/white-papers/amd-cdna-3-white-paper.pdf", "read")
_MI350X = Origin("AMD Instinct MI350X brochure LE-92701-00 C (Sept 2025)",
    f"{_AMD}/product-briefs/amd-instinct-mi350x-gpu-brochure.pdf", "quoted")
_MI355X = Origin("AMD Instinct MI355X brochure; Introducing AMD CDNA 4 Architecture (2025), table 1",
    f"{_AMD}/product-briefs/amd-instinct-mi355x-gpu-brochure.pdf", "quoted")


# --- devices -------------------------------------------------------------------------------------


def _peaks(**tflops: float) -> Mapping[str, float]:
    # Text is converted, because 989.4 * 1e12 and 989.4e12 differ in the last bit.
    return MappingProxyType({precision: float(f"{rate}e12") for precision, rate in tflops.items()})


def _row(
    names: str,
    architecture: str,
    gib: float | None,
    gb_per_s: float | None,
    tdp_w: float | None,
    peaks: Mapping[str, float],
    source: Origin,
    note: str = "",
    sensor: KnownSensor | None = None,
    gain_measured: tuple[float, float] | None = None,
) -> Hardware:
    return Hardware(
        names=tuple(names.split(", ")),
        architecture=architecture,
        flops_per_s=peaks,
        memory_bytes=None if gib is None else int(gib * 2**30),
        memory_bytes_per_s=None if gb_per_s is None else float(f"{gb_per_s}e9"),
        tdp_w=tdp_w,
        source=source,
        sensor=sensor or SENSORS[architecture],
        note=note,
        gain_measured=gain_measured,
    )


_GV100_SXM = _peaks(fp64=7.8, fp32=15.7, fp16=125)
_GV100_PCIE = _peaks(fp64=7, fp32=14, fp16=112)
_TU102 = _peaks(fp32=16.3, fp16=130.5, int8=261)
_GA100 = _peaks(fp64=19.5, fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624)
_GH100_SXM = _peaks(fp64=66.9, fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9)
_GH100_PCIE = _peaks(fp64=51.2, fp32=51.2, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513)
_GH100_NVL = _peaks(fp64=60, fp32=60, tf32=417.5, bf16=835.5, fp16=835.5, fp8=1670.5, int8=1670.5)
_GH100_H800 = _peaks(fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4, fp8=1978.9, int8=1978.9)
_GH100_H20 = _peaks(fp32=44, tf32=74, bf16=148, fp16=148, fp8=296, int8=296)
_MI300X = _peaks(fp64=163.4, fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9, int8=2614.9)

_A100_PCIE_READS = (-0.058, -0.055)  # range of the error of energy and power against a meter
_RTX_3090_READS = (-0.056, -0.040)

_A100_PCIE = "It is not known which of the two A100 PCIe boards (40 or 80 GB) was compared with a meter."
_NO_TENSOR = "The board has no tensor cores and adds up FP16 products in FP16."
_TURING_BOARD = "The power is that of the GPU alone and was not checked. The whole board with its outputs draws 295 W."
_FOUNDERS = "Clock and power are given for NVIDIA's own board. Boards of other makers differ."
_A800_NOTE = "The board is an A100 with less NVLink. A cloud provider's table has the same numbers."
_MODULE = "The power is that of the whole module (CPU, GPU, memory) and can be configured from 450 W on."
_GCD = (
    "This row describes one of the two dies of a module, because the driver lists each die as a device. "
    "The numbers are half of the module's numbers. One die reports the power of both dies."
)

ROWS: tuple[Hardware, ...] = (
    # Pascal, Volta, Turing
    _row("Tesla P100-PCIE-16GB", "Pascal", 16, 732, 250, _peaks(fp64=4.7, fp32=9.3, fp16=18.7), _P100, _NO_TENSOR),
    _row("Tesla P100-SXM2-16GB", "Pascal", 16, 720, 300, _peaks(fp64=5.3, fp32=10.6, fp16=21.2), _P100_SXM,
         _NO_TENSOR + " The datasheet states 732 GB/s."),
    _row("Tesla P40", "Pascal", 24, 346, 250, _peaks(fp32=12, int8=47), _P40,
         "The rate of FP16 (1/64 of FP32) is left out."),
    _row("Tesla V100-SXM2-16GB", "Volta", 16, 900, 300, _GV100_SXM, _V100),
    _row("Tesla V100-SXM2-32GB", "Volta", 32, 900, 300, _GV100_SXM, _V100),
    _row("Tesla V100-SXM3-32GB", "Volta", 32, 900, 350, _GV100_SXM, _V100_CHIP, "Its memory may be faster."),
    _row("Tesla V100-DGXS-16GB", "Volta", 16, 900, 300, _GV100_SXM, _V100_CHIP, "The power is that of 32 GB."),
    _row("Tesla V100-DGXS-32GB", "Volta", 32, 900, 300, _GV100_SXM, _V100_CHIP),
    _row("Tesla V100-PCIE-16GB", "Volta", 16, 900, 250, _GV100_PCIE, _V100),
    _row("Tesla V100-PCIE-32GB", "Volta", 32, 900, 250, _GV100_PCIE, _V100),
    _row("Tesla V100S-PCIE-32GB", "Volta", 32, 1134, 250, _peaks(fp64=8.2, fp32=16.4, fp16=130), _V100),
    _row("Tesla T4", "Turing", 16, 320, 70, _peaks(fp32=8.1, fp16=65, int8=130), _T4,
         "The editions of the datasheet state 300 or 320+ GB/s. A bus of 256 bits at 10 Gbit/s gives 320 GB/s."),
    _row("Quadro RTX 6000", "Turing", 24, 672, 260, _TU102, _TURING, _TURING_BOARD),
    _row("Quadro RTX 8000", "Turing", 48, 672, 260, _TU102, _TURING,
         "The Quadro RTX 6000 has the same GPU and the same clocks. " + _TURING_BOARD,
         replace(SENSORS["Turing"], window_s=0.020, note="This board measures 20 ms of every 100 ms.")),
    _row("NVIDIA GeForce RTX 2080 Ti", "Turing", 11, 616, 260, _peaks(fp32=14.2, fp16=56.9, int8=227.7), _TURING_BLOG,
         _FOUNDERS),
    _row("NVIDIA TITAN RTX", "Turing", 24, 672, 280, _peaks(fp32=16.3, fp16=130.5), _TITAN_RTX,
         "It was not checked whether accumulation in FP32 halves the rate, as on GeForce."),
    # Ampere
    _row("NVIDIA A100-SXM4-40GB, A100-SXM-40GB", "Ampere GA100", 40, 1555, 400, _GA100, _A100),
    _row("NVIDIA A100-SXM4-80GB, A100-SXM-80GB", "Ampere GA100", 80, 2039, 400, _GA100, _A100,
         "On some servers nvidia-smi shows a limit of 500 W."),
    _row("NVIDIA A100-SXM-64GB", "Ampere GA100", 64, 1631, None,
         _peaks(fp64=22.4, fp32=22.4, tf32=179, bf16=358.1, fp16=358.1, int8=716.2), _A100_64,
         "This board of Leonardo has 124 SMs, and other A100 boards have 108."),
    _row("NVIDIA A100-PCIE-40GB", "Ampere GA100", 40, 1555, 250, _GA100, _A100, _A100_PCIE,
         gain_measured=_A100_PCIE_READS),
    _row("NVIDIA A100 80GB PCIe", "Ampere GA100", 80, 1935, 300, _GA100, _A100, _A100_PCIE,
         gain_measured=_A100_PCIE_READS),
    _row("NVIDIA A800-SXM4-40GB", "Ampere GA100", 40, 1555, 400, _GA100, _A800, _A800_NOTE),
    _row("NVIDIA A800-SXM4-80GB", "Ampere GA100", 80, 2039, 400, _GA100, _A800,
         _A800_NOTE),
    _row("NVIDIA A800 80GB PCIe", "Ampere GA100", 80, 1935, 300, _GA100, _A800, _A800_NOTE),
    _row("NVIDIA A30", "Ampere GA100", 24, 933, 165,
         _peaks(fp64=10.3, fp32=10.3, tf32=82, bf16=165, fp16=165, int8=330), _A30),
    _row("NVIDIA A10", "Ampere GA10x", 24, 600, 150, _peaks(fp32=31.2, tf32=62.5, bf16=125, fp16=125, int8=250), _A10),
    _row("NVIDIA A10G", "Ampere GA10x", 24, 600, 300, _peaks(tf32=35, bf16=70, fp16=70, int8=140), _A10G,
         "The power was printed by nvidia-smi and was not checked. Lightning uses 125 TFLOP/s, the rate of the A10."),
    _row("NVIDIA A2", "Ampere GA10x", 16, 200, 60, _peaks(fp32=4.5, bf16=18.1, fp16=18.1), _A2,
         "The power can be configured from 40 W on."),
    _row("NVIDIA A40", "Ampere GA10x", 48, 696, 300, _peaks(fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7, int8=299.3),
         _A40),
    _row("NVIDIA RTX A6000", "Ampere GA10x", 48, 768, 300,
         _peaks(fp32=38.7, tf32=77.4, bf16=154.8, fp16=154.8, int8=309.7), _GA102),
    _row("NVIDIA RTX A5000", "Ampere GA10x", 24, 768, 230, _peaks(fp32=27.8, bf16=111.1, fp16=111.1), _RTX_A),
    _row("NVIDIA RTX A4000", "Ampere GA10x", 16, 448, 140, _peaks(fp32=19.2, bf16=76.7, fp16=76.7), _RTX_A),
    _row("NVIDIA GeForce RTX 3070 Ti", "Ampere GA10x", 8, 608, 290, _peaks(fp32=21.7, bf16=43.5, fp16=43.5),
         _RTX_3070_TI, "Memory and power are NVIDIA's product page of the RTX 3070 family, not checked."),
    _row("NVIDIA GeForce RTX 3080", "Ampere GA10x", 10, 760, 320,
         _peaks(fp32=29.8, tf32=29.8, bf16=59.5, fp16=59.5, int8=238), _GA102_COUNTED,
         "This row describes the board with 10 GB. A board with 12 GB and 61.3 TFLOP/s has the same name."),
    _row("NVIDIA GeForce RTX 3090", "Ampere GA10x", 24, 936, 350,
         _peaks(fp32=35.6, tf32=35.6, bf16=71.2, fp16=71.2, int8=284), _RTX_50,
         _FOUNDERS + " GA102 Architecture rounds the BF16 rate to 71 TFLOP/s.", gain_measured=_RTX_3090_READS),
    _row("NVIDIA GeForce RTX 3090 Ti", "Ampere GA10x", 24, 1008, 450,
         _peaks(fp32=40, tf32=40, bf16=80, fp16=80, int8=320), _GA102_COUNTED, _FOUNDERS),
    # Ada Lovelace
    _row("NVIDIA L4", "Ada Lovelace", 24, 300, 72, _peaks(fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242, int8=242),
         _L4, "TensorRT-LLM rounds the BF16 rate to 120 TFLOP/s."),
    _row("NVIDIA L2", "Ada Lovelace", 24, 300, 72,
         _peaks(fp32=24.1, tf32=48.3, bf16=96.5, fp16=96.5, fp8=193, int8=193), _L20),
    _row("NVIDIA L20", "Ada Lovelace", 48, 864, 275,
         _peaks(fp32=59.8, tf32=59.8, bf16=119.5, fp16=119.5, fp8=239, int8=239), _L20,
         "TensorRT-LLM states 119 TFLOP/s (16 bits) and 238 TFLOP/s (8 bits). Alibaba Cloud states 119 and 237 "
         "TFLOP/s."),
    _row("NVIDIA L40", "Ada Lovelace", 48, 864, 300,
         _peaks(fp32=90.5, tf32=90.5, bf16=181.05, fp16=181.05, fp8=362, int8=362), _L40,
         "The rate is half the rate of the L40S, because accumulation in FP32 halves the rate as on GeForce."),
    _row("NVIDIA L40S", "Ada Lovelace", 48, 864, 350,
         _peaks(fp32=91.6, tf32=183, bf16=362.05, fp16=362.05, fp8=733, int8=733), _L40S,
         "The datasheet's dense rate is 362.05 TFLOP/s. Half of its sparse rate of 733 TFLOP/s would be 366.5 "
         "TFLOP/s."),
    _row("NVIDIA RTX 6000 Ada Generation", "Ada Lovelace", 48, 960, 300,
         _peaks(fp32=91.1, tf32=182.1, bf16=364.2, fp16=364.2, fp8=728.5, int8=728.5), _RTX_PRO,
         "The document rounds the rates of 364.2 and 728.5 TFLOP/s to 364 and 728 TFLOP/s. FP32 and TF32 were not "
         "checked."),
    _row("NVIDIA RTX 5000 Ada Generation", "Ada Lovelace", 32, 576, 250,
         _peaks(fp32=65.3, bf16=261.1, fp16=261.1, fp8=522.2), _RTX_ADA, "Bandwidth and power were not checked."),
    _row("NVIDIA RTX 4000 Ada Generation", "Ada Lovelace", 20, 360, 130,
         _peaks(fp32=26.7, bf16=106.9, fp16=106.9, fp8=213.8), _RTX_ADA,
         "Texts with 327.6 TFLOP/s of sparse FP8, not 427.6, are wrong: products were faster than a quarter of it."),
    _row("NVIDIA RTX 4000 SFF Ada Generation", "Ada Lovelace", 20, 280, 70,
         _peaks(fp32=19.2, bf16=76.7, fp16=76.7, fp8=153.4), _RTX_ADA, "Bandwidth and power were not checked."),
    _row("NVIDIA GeForce RTX 4070 Ti", "Ada Lovelace", 12, 504, 285,
         _peaks(fp32=40.1, bf16=80.2, fp16=80.2, fp8=160.4), _ADA_COUNTED, _FOUNDERS),
    _row("NVIDIA GeForce RTX 4080 SUPER", "Ada Lovelace", 16, 736, 320,
         _peaks(fp32=52.2, bf16=104.4, fp16=104.4, fp8=208.9), _ADA_COUNTED, _FOUNDERS),
    _row("NVIDIA GeForce RTX 4080", "Ada Lovelace", 16, 717, 320,
         _peaks(fp32=48.7, tf32=48.7, bf16=97.5, fp16=97.5, fp8=194.9, int8=389.9), _ADA_COUNTED, _FOUNDERS),
    _row("NVIDIA GeForce RTX 4090", "Ada Lovelace", 24, 1008, 450,
         _peaks(fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6), _ADA,
         _FOUNDERS + " Versions of the paper before v2.02 state 660.6 TFLOP/s for FP8."),
    _row("NVIDIA GeForce RTX 4090 D", "Ada Lovelace", 24, 1008, 425,
         _peaks(fp32=73.5, bf16=147.1, fp16=147.1, fp8=294.2), _ADA_COUNTED, _FOUNDERS),
    # Hopper
    _row("NVIDIA H100 80GB HBM3, H100 SXM5 80GB", "Hopper", 80, 3350, 700, _GH100_SXM, _H100),
    _row("NVIDIA H100", "Hopper", None, None, 700, _GH100_SXM, _H100_OTHERS,
         "The driver has this name for modules with 64, 94 and 96 GB. Their memory is what the driver reports."),
    _row("NVIDIA H100 PCIe", "Hopper", 80, 2000, 350, _GH100_PCIE, _H100_PCIE,
         "The 2039 GB/s in NVIDIA's paper were preliminary."),
    _row("NVIDIA H100 NVL", "Hopper", 94, 3938, 400, _GH100_NVL, _H100_NVL,
         "This row describes one card. A pair of cards has 188 GB."),
    _row("NVIDIA H200", "Hopper", 141, 4800, 700, _GH100_SXM, _H200),
    _row("NVIDIA H200 NVL", "Hopper", 141, 4813, 600, _GH100_NVL, _H200_NVL,
         "The datasheet of July 2024 still has the peaks of the H200 SXM for this card."),
    _row("NVIDIA GH200 480GB, NVIDIA GH200 120GB", "Hopper", 96, 4000, 1000, _GH100_SXM, _GH200,
         _MODULE + " The size in the name is the CPU's memory."),
    _row("NVIDIA GH200 144G HBM3e", "Hopper", 144, 4900, 1000, _GH100_SXM, _GH200, _MODULE),
    _row("NVIDIA H800", "Hopper", 80, 3350, 700, _GH100_H800, _H800,
         "The power was not checked. The rate of FP64 (about 1 TFLOP/s) is left out."),
    _row("NVIDIA H800 PCIe", "Hopper", 80, 2000, 350,
         _peaks(fp32=51.2, tf32=378, bf16=756, fp16=756, fp8=1513, int8=1513), _H800,
         "The rate of FP64 is left out. The other rates are those of the H100 PCIe; a text quotes sparse FP8."),
    _row("NVIDIA H20-3e", "Hopper", 141, None, 500, _GH100_H20, _H20, "An H20 with more memory; bandwidth not found."),
    _row("NVIDIA H20", "Hopper", 96, 4000, 500, _GH100_H20, _H20,
         "The power was printed by nvidia-smi (400 W in early reports). TensorRT-LLM states 147 TFLOP/s "
         "(16 bits) and 293 TFLOP/s (8 bits)."),
    # Blackwell
    _row("NVIDIA B200", "Blackwell", 180, 7700, 1000,
         _peaks(fp64=37, fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, fp4=9000, int8=4500), _BLACKWELL,
         "This row describes a GPU of an HGX. TF32 is an eighth of the total of eight GPUs, because the stated rate of "
         "one GPU is rounded to 1100 TFLOP/s."),
    _row("NVIDIA GB200", "Blackwell", 186, 8000, 1200,
         _peaks(fp64=40, fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, fp4=10000, int8=5000), _BLACKWELL,
         "NVIDIA's own benchmarks use 2450 TFLOP/s for BF16, 4900 TFLOP/s for FP8 and 9800 TFLOP/s for FP4."),
    _row("NVIDIA B300 SXM6 AC, NVIDIA B300", "Blackwell", 270, 7700, 1100,
         _peaks(fp64=1.2, fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500, fp4=14000, int8=153.5), _ULTRA,
         "NVIDIA's own benchmarks use 13500 TFLOP/s for FP4, which is also an eighth of the total of eight GPUs. Other "
         "documents state 288 GB and 8 TB/s."),
    _row("NVIDIA GB300", "Blackwell", 279, 8000, 1400,
         _peaks(fp32=80, tf32=1250, bf16=2500, fp16=2500, fp8=5000, fp4=15000, int8=165), _ULTRA,
         "NVIDIA's own benchmarks use 2450 TFLOP/s for BF16, 4900 TFLOP/s for FP8 and 14700 TFLOP/s for FP4."),
    _row("NVIDIA GB10", "Blackwell", 128, 273, 140, _peaks(bf16=125, fp16=125, fp8=250, fp4=500), _GB10,
         "Only the rate of sparse FP4 is published. BF16 matrix products reached 100 TFLOP/s in a measurement. GPU and "
         "CPU share memory and power."),
    _row("NVIDIA Thor", "Blackwell", 128, 273, 130,
         _peaks(fp32=8.1, bf16=258.5, fp16=258.5, fp8=517, fp4=1035), _THOR,
         "GPU and CPU share memory and power. A smaller module may have the same name."),
    _row("NVIDIA RTX PRO 6000 Blackwell Server Edition", "Blackwell", 96, 1597, 600,
         _peaks(fp32=120, bf16=500, fp16=500), _RTX_PRO_SERVER,
         "The page's 1 PFLOP of BF16 is assumed to be sparse, because the Workstation Edition has a dense "
         "rate of 503.8 TFLOP/s."),
    _row("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "Blackwell", 96, 1792, 600,
         _peaks(bf16=503.8, fp16=503.8), _RTX_PRO),
    _row("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "Blackwell", 96, 1792, 300,
         _peaks(fp32=109.7, tf32=219.5, bf16=438.9, fp16=438.9, fp8=877.9, fp4=1755.7, int8=877.9), _RTX_PRO),
    _row("NVIDIA GeForce RTX 5080", "Blackwell", 16, 960, 360, _peaks(bf16=112.6, fp16=112.6, fp8=225.1), _RTX_50,
         _FOUNDERS),
    _row("NVIDIA GeForce RTX 5090 D", "Blackwell", 32, 1792, 575, _peaks(fp32=104.8, bf16=209.5, fp16=209.5, fp8=419),
         _RTX_5090_D, "The rates of FP4 and INT8 are limited, and are left out. Memory and power were not checked."),
    _row("NVIDIA GeForce RTX 5090", "Blackwell", 32, 1792, 575,
         _peaks(fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419, fp4=1676, int8=838), _RTX_50,
         _FOUNDERS + " Accumulation in FP32 does not halve the rate of FP4. FP32, TF32 and INT8 were not checked."),
    # AMD
    _row("AMD Instinct MI100", "CDNA", 32, 1228.8, 300, _peaks(fp64=11.5, fp32=46.1, bf16=92.3, fp16=184.6, int8=184.6),
         _MI100, "Power and FP64 were not checked."),
    _row("AMD Instinct MI210", "CDNA 2", 64, 1638.4, 300, _peaks(fp64=45.3, fp32=45.3, bf16=181, fp16=181, int8=181),
         _MI210, "The power was not checked."),
    _row("AMD Instinct MI250", "CDNA 2", 64, 1638.4, 250, _peaks(fp64=45.3, fp32=45.3, bf16=181, fp16=181, int8=181),
         _CDNA3, _GCD + " The module has 500 W and 362.1 TFLOP/s."),
    _row("AMD Instinct MI250X", "CDNA 2", 64, 1638.4, 280,
         _peaks(fp64=47.85, fp32=47.85, bf16=191.5, fp16=191.5, int8=191.5), _CDNA3,
         _GCD + " The module has 560 W and 383 TFLOP/s."),
    _row("AMD Instinct MI250X / MI250", "CDNA 2", 64, 1638.4, None, _peaks(), _CDNA3,
         "This is libdrm's name of PCI device 740C, one die of an MI250X or MI250. Peak and power are unknown."),
    _row("AMD Instinct MI300A", "CDNA 3", 128, 5325, 760,
         _peaks(fp64=122.6, fp32=122.6, tf32=490.3, bf16=980.6, fp16=980.6, fp8=1961.2, int8=1961.2), _CDNA3,
         "The power is that of the whole socket with its CPU. Another configuration has 550 W."),
    _row("AMD Instinct MI300X", "CDNA 3", 192, 5325, 750, _MI300X, _CDNA3),
    _row("AMD Instinct MI325X", "CDNA 3", 256, 6000, 1000, _MI300X, _CDNA3),
    _row("AMD Instinct MI350X", "CDNA 4", 288, 8000, 1000,
         _peaks(fp64=72.1, fp32=144.2, bf16=2306.9, fp16=2306.9, fp8=4613.7, fp4=9227.5, int8=4613.7), _MI350X,
         "The brochure prints 2309.6 TFLOP/s for BF16. Half of its FP8 rate is 2306.9 TFLOP/s, which is also 256 CUs x "
         "4096 FLOP x 2.2 GHz. The device has no TF32."),
    _row("AMD Instinct MI355X", "CDNA 4", 288, 8000, 1400,
         _peaks(fp64=78.6, fp32=157.3, bf16=2516.6, fp16=2516.6, fp8=5033.2, fp4=10066.3, int8=5033.2), _MI355X,
         "The device has no TF32."),
)
# fmt: on
