-- Remove some entries of failed puts: those that the task does not count. It removes none if one of these is
-- a group.
-- KEYS[1] stream
-- Returns the page: how many were removed
--@include task put_record puts unrecorded waking permissions

if not exists() then
  return cmsgpack.pack({found = 0})
end
local fault, orphans = fault_of_puts()
if fault or orphans == 0 then
  return cmsgpack.pack({found = 0})
end
check_permissions(KEYS[1])
begin_writing()
local more = remove_orphans(last_counted(), '+')
wake_room()
return cmsgpack.pack({more = more, found = orphans})
