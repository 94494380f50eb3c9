-- Remove some entries of failed puts: those that the task does not count. It removes none if one of these is
-- a group.
-- KEYS[1] stream
-- Returns {removed, more}: how many were removed; 1 if there may be more
--@include task counted puts uncounted waking permissions

if not exists() then
  return {0, 0}
end
local fault, orphans = fault_of_puts()
if fault or orphans == 0 then
  return {0, 0}
end
check_permissions(KEYS[1])
begin_writing()
local more = remove_orphans(last_counted(), '+')
wake_room()
return {orphans, more and 1 or 0}
