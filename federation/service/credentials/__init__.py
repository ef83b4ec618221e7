"""What shows who a member is: certificates, identity folders, signing keys."""
