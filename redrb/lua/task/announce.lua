-- Announce a worker to those who look at the task, at most as often as heartbeats come.
-- KEYS[1] stream
-- ARGV    the call `Announce` of redrb/stream/task/calls.py; the announcement: include/announcements.lua
-- Returns nil; without a task it does nothing
--@include task announcements permissions

check_permissions(KEYS[1])
begin_writing()
if exists() then
  local ask = cmsgpack.unpack(ARGV[1])
  announce(ask.worker, ARGV[2], ask.ended)
end
return cmsgpack.pack(nil)
