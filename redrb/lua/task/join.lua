-- Register a consumer group: from now on no entry is deleted before it is done there.
-- KEYS[1] stream
-- ARGV    group, start    start: '' for all that is stored, '+' for nothing of it, or a seq: history
--                         too, from that one on
-- Returns 1, 0 when the task does not exist, 2 when there is more to do: the same again; 3 when the
-- task keeps no history to start in.
--@include task index membership

begin_writing()
if not exists() then
  return 0
end
local start = ARGV[2] == '+' and math.huge or tonumber(ARGV[2])
if start and start < math.huge and not rules().indexed then
  return 3
end
return join(ARGV[1], start) and 1 or 2
