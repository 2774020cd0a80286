"""Generated from proto/ by scripts/proto.sh: do not edit."""
