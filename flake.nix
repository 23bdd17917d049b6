{
  description = "FlashRT kernel families; nix build .#<family> builds every variant of one";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder }:
    let
      workspace = (builtins.fromTOML (builtins.readFile ./build.toml)).workspace;
      systems = [
        "x86_64-linux"
        "aarch64-linux"
      ];
      attributes =
        names: value:
        builtins.listToAttrs (
          map (name: {
            inherit name;
            value = value name;
          }) names
        );
      # kernel-builder's outputs of one family, all systems.
      family =
        name:
        kernel-builder.lib.genKernelFlakeOutputs {
          inherit self;
          path = ./kernel_sources + "/${name}";
        };
      families = attributes workspace.members family;
    in
    {
      packages = attributes systems (
        system: builtins.mapAttrs (_: outputs: outputs.packages.${system}.bundle) families
      );
    };
}
