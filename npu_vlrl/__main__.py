from npu_vlrl.cli import main

raise SystemExit(main())
