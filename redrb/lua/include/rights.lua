-- Says whether the user may run the commands of a put, before one of them fails midway.

local PUT_COMMANDS = {'DEL', 'EXISTS', 'HDEL', 'HGET', 'HGETALL', 'HINCRBY', 'HINCRBYFLOAT', 'HLEN',
  'HMGET', 'HRANDFIELD', 'HSET', 'PEXPIRE', 'RPUSH', 'SMEMBERS', 'TIME', 'UNLINK', 'XDEL', 'XLEN',
  'XPENDING', 'XRANGE', 'XREVRANGE', 'ZADD', 'ZCARD', 'ZCOUNT', 'ZMSCORE', 'ZPOPMIN', 'ZRANGE',
  'ZRANGEBYLEX', 'ZRANGEBYSCORE', 'ZREM', 'ZREMRANGEBYRANK', 'ZREVRANGE', 'ZSCORE'}

-- The first command of a put that the user may not run, or nil.
local function forbidden_command()
  for _, command in ipairs(redis.acl_check_cmd and PUT_COMMANDS or {}) do
    if not redis.acl_check_cmd(command) then
      return command
    end
  end
  return nil
end
