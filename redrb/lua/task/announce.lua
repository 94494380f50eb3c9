-- Announce a worker to those who look at the task, at most as often as heartbeats come.
-- KEYS[1] stream
-- ARGV    worker, announcement, ended
--         announcement: include/announcements.lua; ended: '1' if the worker ends
-- Returns nothing; without a task it does nothing
--@include task announcements permissions

check_permissions(KEYS[1])
begin_writing()
if exists() then
  announce(ARGV[1], ARGV[2], ARGV[3] == '1')
end
