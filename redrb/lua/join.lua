-- Register a consumer group: from now on no entry is deleted before it is done there.
-- KEYS[1] stream
-- ARGV    group
-- Returns 1, or 0 when the task does not exist.
--@ _task _room _groups

begin_writing()
if not exists() then
  return 0
end
join(ARGV[1])
return 1
