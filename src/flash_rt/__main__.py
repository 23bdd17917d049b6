from flash_rt.flashrt_hf.cli import main

main()
