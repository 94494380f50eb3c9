-- Rebuild the settings of a task whose key was lost, as those of a task that was given none. Its field
-- `rebuilt` lets processes give them again: task/open.lua.
-- KEYS[1] stream
-- ARGV    the call `RebuildSettings` of redrb/watch/doctor/calls.py
-- Returns its reply; repeated, it changes nothing
--@include task settings unrecorded permissions

if left_without_settings() > 0 then
  check_permissions(stream)
  begin_writing()
  local ask = cmsgpack.unpack(ARGV[1])
  redis.call('HSET', task, 'incarnation', ask.incarnation, 'revision', ask.incarnation, 'rebuilt', '1')
  for name, value in pairs(ask.defaults) do
    redis.call('HSET', task, name, value)
  end
  pack_rules()
end
return cmsgpack.pack(redis.call('XLEN', stream))
