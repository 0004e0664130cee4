# Kernels of the cuda backend: nvcc compiles every src/cuda/kernel/*.cu into one fat binary, which becomes part of libmok (cuda/host/kernels.c).
#
#   MOK_CUDA         AUTO: if nvcc is there; ON: or stop; OFF: never. Without kernels the library still has the backend, which says so.
#   MOK_CUDA_ARCHS   architectures: Hopper and both Blackwells; one of them builds in a third of the time
#   MOK_NVCC         the compiler, found in PATH and /usr/local/cuda/bin
#
# Needs no CUDA language support of CMake and links nothing. Spills and serialised wgmma are errors (tools/check_ptxas.sh).
set(MOK_CUDA AUTO CACHE STRING "Kernels for GPUs: AUTO, ON or OFF")
set(MOK_CUDA_ARCHS "90a;100a;103a" CACHE STRING "GPU architectures to compile for")
option(MOK_UNBOUNDED_WAITS "For bench/waits.py alone: kernels whose waits look at no clock, so that what goes wrong hangs for ever" OFF)
option(MOK_CUDA_LINES "Keep lines of the source for debuggers and profilers in the kernels" OFF)
set_property(CACHE MOK_CUDA PROPERTY STRINGS AUTO ON OFF)

# Adds the image to `target`, or the reason why there is none.
function(mok_add_cuda_kernels target)
  set(source_dir ${PROJECT_SOURCE_DIR}/src)
  file(GLOB kernels CONFIGURE_DEPENDS ${source_dir}/cuda/kernel/*.cu)
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${source_dir}/cuda/*.cuh ${source_dir}/cuda/*.h ${source_dir}/layout/*.h ${source_dir}/mx/*.h ${source_dir}/backend/operation.h)
  if(MOK_CUDA STREQUAL "OFF")
    set(why "built without kernels for GPUs (MOK_CUDA=OFF)")
  elseif(NOT kernels)
    set(why "built without kernels for GPUs (src/cuda/kernel has no .cu file)")
  else()
    if(MOK_NVCC AND NOT EXISTS ${MOK_NVCC})
      message(STATUS "cuda: there is no ${MOK_NVCC}; looking for another")
      unset(MOK_NVCC CACHE)
    endif()
    find_program(MOK_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(NOT MOK_NVCC)
      set(why "built without nvcc, so without kernels for GPUs")
    endif()
  endif()
  if(why)
    if(MOK_CUDA STREQUAL "ON")
      message(FATAL_ERROR "MOK_CUDA=ON, but this would be ${why}")
    endif()
    message(STATUS "cuda: ${why}")
    set_property(SOURCE ${source_dir}/cuda/host/kernels.c APPEND PROPERTY COMPILE_DEFINITIONS "MOK_CUDA_IMAGE_WHY=\"${why}\"")
    return()
  endif()

  set(gencode "")
  foreach(arch ${MOK_CUDA_ARCHS})
    list(APPEND gencode -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
  string(REPLACE ";" ", sm_" archs "${MOK_CUDA_ARCHS}")
  set(out ${CMAKE_CURRENT_BINARY_DIR}/cuda)
  set(all_text "")
  foreach(kernel ${kernels})
    string(APPEND all_text "#include \"${kernel}\"\n")
  endforeach()
  file(GENERATE OUTPUT ${out}/kernels.cu CONTENT "${all_text}")
  file(GENERATE OUTPUT ${out}/image.S CONTENT
".section .note.GNU-stack,\"\",%progbits
.section .rodata
.global mk_cuda_image_start
.hidden mk_cuda_image_start
.type mk_cuda_image_start, %object
.balign 64
mk_cuda_image_start:
.incbin \"${out}/kernels.fatbin\"
.balign 64
.size mk_cuda_image_start, . - mk_cuda_image_start
")
  set(lines "")
  if(MOK_CUDA_LINES)
    set(lines -lineinfo)
  endif()
  set(waits "")
  if(MOK_UNBOUNDED_WAITS)
    set(waits -DMK_UNBOUNDED_WAITS)
    message(STATUS "cuda: waits of kernels are unbounded, to be measured and not to be used")
  endif()
  add_custom_command(OUTPUT ${out}/kernels.fatbin
    COMMAND sh ${PROJECT_SOURCE_DIR}/tools/check_ptxas.sh ${out}/ptxas.log
            ${MOK_NVCC} -fatbin -t 2 ${gencode} -std=c++17 -O3 -fmad=false ${lines} ${waits} -Xptxas -v -I${source_dir} -I${PROJECT_SOURCE_DIR}/include
            -o ${out}/kernels.fatbin ${out}/kernels.cu
    DEPENDS ${kernels} ${headers} ${out}/kernels.cu ${PROJECT_SOURCE_DIR}/tools/check_ptxas.sh
    COMMENT "nvcc: kernels for sm_${archs}" VERBATIM)
  set_property(SOURCE ${out}/image.S PROPERTY OBJECT_DEPENDS ${out}/kernels.fatbin)
  target_sources(${target} PRIVATE ${out}/image.S)
  set_property(SOURCE ${source_dir}/cuda/host/kernels.c APPEND PROPERTY COMPILE_DEFINITIONS "MOK_CUDA_IMAGE_ARCHS=\"${archs}\"")
endfunction()
