-- Rebuild the settings of a task whose key was lost, as those of a task that was given none. Its field
-- `rebuilt` lets processes give them again: task/open.lua.
-- KEYS[1] stream
-- ARGV    incarnation, name, value, ...
--         incarnation: random name of the task's new incarnation; name, value: of defaults
-- Returns the number of groups stored; repeated, it changes nothing
--@include task settings uncounted permissions

if left_without_settings() > 0 then
  check_permissions(stream)
  begin_writing()
  redis.call('HSET', task, 'incarnation', ARGV[1], 'revision', ARGV[1], 'rebuilt', '1', unpack(ARGV, 2))
  pack_rules()
end
return redis.call('XLEN', stream)
