/* SPDX-License-Identifier: Apache-2.0 */
/* HKDF by the vectors of RFC 5869, and a launch's keys by those of PROTOCOL.md. */
#include "secret_file.h"
#include "testing.h"

static const openssl *o;

static size_t from_hex(const char *text, uint8_t *out)
{
    size_t size = strlen(text) / 2;
    for (size_t i = 0; i < size; i++) {
        unsigned byte;
        assert_int_equal(sscanf(text + 2 * i, "%2x", &byte), 1);
        out[i] = (uint8_t)byte;
    }
    return size;
}

static void check(const char *ikm, const char *salt, const char *info, const char *prk,
                  const char *okm)
{
    uint8_t secret[128], salted[128], about[128], expected[128], root[KEY_SIZE],
        out[128];
    size_t secret_size = from_hex(ikm, secret), salt_size = from_hex(salt, salted);
    assert_true(hkdf_extract(o, salted, salt_size, secret, secret_size, root));
    from_hex(prk, expected);
    assert_memory_equal(root, expected, KEY_SIZE);
    size_t info_size = from_hex(info, about), size = from_hex(okm, expected);
    assert_true(hkdf_expand(o, root, about, info_size, out, size));
    assert_memory_equal(out, expected, size);
}

TEST(hkdf_is_rfc_5869s)
{
    check("0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b", "000102030405060708090a0b0c",
          "f0f1f2f3f4f5f6f7f8f9",
          "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
          "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b8"
          "871858"
          "65");
    check(
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223242526"
        "272829"
        "2a2b2c2d2e2f303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f",
        "606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283848586"
        "878889"
        "8a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7a8a9aaabacadaeaf",
        "b0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6"
        "d7d8d9"
        "dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
        "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac782"
        "7271cb"
        "41c65e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d"
        "87");
    check("0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b", "", "",
          "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
          "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4"
          "b61a96"
          "c8");
}

TEST(keys_are_the_protocols)
{
    uint8_t secret[SECRET_SIZE], root[KEY_SIZE], key[KEY_SIZE], expected[KEY_SIZE];
    uint8_t world[16];
    char identity[IDENTITY_MOST];
    for (uint8_t i = 0; i < SECRET_SIZE; i++)
        secret[i] = i;
    memset(world, 5, sizeof world);
    assert_true(launch_root(o, secret, root));
    assert_true(launch_key(o, root, IDENTITY_READER, key));
    from_hex("9a6e2fbef2baec177775d65135321e26c945172a929b9236f32eb15b9338abd9",
             expected);
    assert_memory_equal(key, expected, KEY_SIZE);
    rank_identity(world, 3, identity);
    assert_string_equal(identity, "fanin/1/rank/05050505050505050505050505050505/3");
    assert_true(launch_key(o, root, identity, key));
    from_hex("3bce9821d8e5f0c9cb5a7234221f7fe4f6dcefa182f98037c1eba882a0b7904b",
             expected);
    assert_memory_equal(key, expected, KEY_SIZE);
    rank_identity(world, UINT32_MAX, identity); /* the longest there is */
    assert_int_equal(strlen(identity), 13 + 32 + 1 + 10);
    relay_identity(world, world, identity);
    assert_string_equal(identity, "fanin/1/relay/05050505050505050505050505050505/"
                                  "05050505050505050505050505050505");
    assert_true(launch_key(o, root, identity, key));
    from_hex("4e66fd6207ab991bd7294a962a9eadb112b5a337f50803fce64207c0f230981f",
             expected);
    assert_memory_equal(key, expected, KEY_SIZE);
}

TEST(too_much_is_refused)
{
    static uint8_t out[255 * KEY_SIZE + 1], info[257];
    assert_true(hkdf_expand(o, out, info, 256, out + KEY_SIZE, 254 * (size_t)KEY_SIZE));
    assert_false(hkdf_expand(o, out, info, 257, out, KEY_SIZE));
    assert_false(hkdf_expand(o, info, info, 0, out, sizeof out));
}

int main(void)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (openssl_load(&o, &error) != FANIN_OK) {
        printf("1..0 # SKIP %s\n", error.message);
        return 77;
    }
    return tests_run(NULL);
}
