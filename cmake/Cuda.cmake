# Defines the target surogate_cuda_libraries: cuBLASLt, cuDNN, NVRTC, the headers of cudnn-frontend and the CUDA runtime.
# They are looked for in the CUDA toolkit and in the Python packages nvidia-cublas, nvidia-cudnn-cu1x, nvidia-cuda-nvrtc and
# nvidia-cudnn-frontend of the interpreter that builds; SUROGATE_CUDA_RPATH is where the libraries lie.
#
#   SUROGATE_CUDA_ARCHS        80;89;90a;100a;120a or native
#   SUROGATE_CUDNN_ROOT        a folder with include/cudnn.h and lib/libcudnn.so.9
#   SUROGATE_CUBLAS_ROOT       a folder with include/cublasLt.h and lib/libcublasLt.so
#   SUROGATE_CUDNN_FRONTEND    a folder with cudnn_frontend.h
set(SUROGATE_CUDA_ARCHS "90a" CACHE STRING "GPU architectures: any of 80;89;90a;100a;120a, or native")
set(SUROGATE_CUDNN_ROOT "" CACHE PATH "Where cuDNN is, if not where it is looked for")
set(SUROGATE_CUBLAS_ROOT "" CACHE PATH "Where cuBLAS is, if not where it is looked for")
set(SUROGATE_CUDNN_FRONTEND "" CACHE PATH "Where cudnn_frontend.h is, if not where it is looked for")

find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_FOUND)
    message(FATAL_ERROR "SUROGATE_CUDA=ON, but no CUDA toolkit was found. Install one (12.8 or later) and make sure that nvcc is on the PATH "
                        "(or set CUDAToolkit_ROOT), or configure with SUROGATE_CUDA=OFF.")
endif()
if(CUDAToolkit_VERSION VERSION_LESS 12.8)
    message(FATAL_ERROR "SUROGATE_CUDA=ON needs a CUDA toolkit of version 12.8 or later, but ${CUDAToolkit_VERSION} was found at "
                        "${CUDAToolkit_BIN_DIR}. Install a newer one or set CUDAToolkit_ROOT.")
endif()
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(arch IN LISTS SUROGATE_CUDA_ARCHS)
    if(arch STREQUAL "native")
        list(APPEND CMAKE_CUDA_ARCHITECTURES native)
    elseif(arch MATCHES "^(80|86|89|90|90a|100|100a|103a|120|120a)$")
        list(APPEND CMAKE_CUDA_ARCHITECTURES ${arch}-real)
    else()
        message(FATAL_ERROR "SUROGATE_CUDA_ARCHS: expected 80, 86, 89, 90a, 100a, 103a, 120a or native, got \"${arch}\".")
    endif()
endforeach()
if(NOT CMAKE_CUDA_COMPILER AND CUDAToolkit_NVCC_EXECUTABLE)
    set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
endif()
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)

# Folders of site-packages that may hold NVIDIA's packages.
set(surogate_packages "")
find_package(Python COMPONENTS Interpreter QUIET)
if(Python_EXECUTABLE)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import sys; print(';'.join(p for p in sys.path if p))"
                    OUTPUT_VARIABLE surogate_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(cublas_roots ${SUROGATE_CUBLAS_ROOT})
set(cudnn_roots ${SUROGATE_CUDNN_ROOT})
set(frontend_folders ${SUROGATE_CUDNN_FRONTEND})
set(nvrtc_roots ${SUROGATE_CUBLAS_ROOT})
foreach(packages IN LISTS surogate_packages)
    list(APPEND cublas_roots ${packages}/nvidia/cu13 ${packages}/nvidia/cublas)
    list(APPEND cudnn_roots ${packages}/nvidia/cudnn)
    list(APPEND nvrtc_roots ${packages}/nvidia/cu13 ${packages}/nvidia/cuda_nvrtc)
    list(APPEND frontend_folders ${packages}/include)
endforeach()
# include/ of a virtual environment, where the wheel of cudnn-frontend puts its headers on some systems.
if(Python_EXECUTABLE)
    get_filename_component(python_root ${Python_EXECUTABLE} DIRECTORY)
    get_filename_component(python_root ${python_root} DIRECTORY)
    list(APPEND frontend_folders ${python_root}/include)
endif()
list(APPEND cublas_roots ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_LIBRARY_ROOT})
list(APPEND nvrtc_roots ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_LIBRARY_ROOT})
list(APPEND cudnn_roots ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_LIBRARY_ROOT} /usr/local /usr)

# Python packages carry the versioned names alone. A header and a library of one root belong together, so the root is sought first.
function(surogate_find_pair name header roots)
    set(library_names ${ARGN})
    foreach(root IN LISTS roots)
        find_path(${name}_include ${header} PATHS ${root}/include NO_DEFAULT_PATH NO_CACHE)
        find_library(${name}_library NAMES ${library_names} PATHS ${root}/lib ${root}/lib64 ${root}/lib/x86_64-linux-gnu NO_DEFAULT_PATH NO_CACHE)
        if(${name}_include AND ${name}_library)
            set(${name}_include ${${name}_include} PARENT_SCOPE)
            set(${name}_library ${${name}_library} PARENT_SCOPE)
            return()
        endif()
        unset(${name}_include)
        unset(${name}_library)
    endforeach()
    set(${name}_include "" PARENT_SCOPE)
    set(${name}_library "" PARENT_SCOPE)
endfunction()
set(major ${CUDAToolkit_VERSION_MAJOR})
surogate_find_pair(cublas cublasLt.h "${cublas_roots}" cublasLt libcublasLt.so.${major})
surogate_find_pair(cudnn cudnn.h "${cudnn_roots}" cudnn libcudnn.so.9)
# The headers of cudnn-frontend refer to it, and cuDNN compiles kernels with it.
surogate_find_pair(nvrtc nvrtc.h "${nvrtc_roots}" nvrtc libnvrtc.so.${major})
find_path(frontend_include cudnn_frontend.h PATHS ${frontend_folders} ${cudnn_include} /usr/local/include /usr/include NO_DEFAULT_PATH NO_CACHE)

set(missing "")
if(NOT cublas_library)
    string(APPEND missing "\n  cuBLAS ${major} (cublasLt.h, libcublasLt.so.${major}): pip install nvidia-cublas, or set SUROGATE_CUBLAS_ROOT")
endif()
if(NOT cudnn_library)
    string(APPEND missing "\n  cuDNN 9 (cudnn.h, libcudnn.so.9): pip install nvidia-cudnn-cu${major}, or set SUROGATE_CUDNN_ROOT")
endif()
if(NOT nvrtc_library)
    string(APPEND missing "\n  NVRTC ${major} (nvrtc.h, libnvrtc.so.${major}): pip install nvidia-cuda-nvrtc, or a whole CUDA toolkit")
endif()
if(NOT frontend_include)
    string(APPEND missing "\n  cudnn-frontend (cudnn_frontend.h): pip install --no-deps nvidia-cudnn-frontend, or set SUROGATE_CUDNN_FRONTEND")
endif()
if(missing)
    message(FATAL_ERROR "SUROGATE_CUDA=ON, but these are missing:${missing}\nLooked in the CUDA toolkit and in the packages of "
                        "${Python_EXECUTABLE}.")
endif()
message(STATUS "CUDA ${CUDAToolkit_VERSION} for ${SUROGATE_CUDA_ARCHS}; cuBLAS: ${cublas_library}; cuDNN: ${cudnn_library}; "
               "cudnn-frontend: ${frontend_include}")

add_library(surogate_cuda_libraries INTERFACE)
target_include_directories(surogate_cuda_libraries SYSTEM INTERFACE ${cublas_include} ${cudnn_include} ${nvrtc_include} ${frontend_include})
if(TARGET CUDA::cudart_static)
    set(runtime CUDA::cudart_static)
else()
    set(runtime CUDA::cudart)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
endif()
target_link_libraries(surogate_cuda_libraries INTERFACE ${runtime} ${cublas_library} ${cudnn_library} ${nvrtc_library}
                      ${CMAKE_DL_LIBS})
target_compile_definitions(surogate_cuda_libraries INTERFACE CUDNN_FRONTEND_SKIP_JSON_LIB)
get_filename_component(cublas_folder ${cublas_library} DIRECTORY)
get_filename_component(cudnn_folder ${cudnn_library} DIRECTORY)
get_filename_component(nvrtc_folder ${nvrtc_library} DIRECTORY)
set(SUROGATE_CUDA_RPATH ${cublas_folder} ${cudnn_folder} ${nvrtc_folder})
list(REMOVE_DUPLICATES SUROGATE_CUDA_RPATH)
# Where the Python packages lie beside ours once installed.
set(SUROGATE_CUDA_INSTALL_RPATH "$ORIGIN/../nvidia/cu${major}/lib" "$ORIGIN/../nvidia/cublas/lib" "$ORIGIN/../nvidia/cudnn/lib"
    "$ORIGIN/../nvidia/cuda_nvrtc/lib")
